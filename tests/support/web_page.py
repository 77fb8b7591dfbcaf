"""The controller's web page in a real browser: Debian's Chromium without a display, driven by selenium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.harness.packages import BROWSER, ensure_packages
from tests.harness.progress import Progress
from tests.harness.waiting import wait_for

Shown = dict[str, Any]
SOON_S = 60.0

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # as root; the page is ours
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--lang=en-GB",
    "--accept-lang=en-GB",
)

READ = """
const text = (each) => each.textContent;
const all = (root, selector) => [...root.querySelectorAll(selector)];
const visible = (each) => !each.hidden;
return {
  connection: document.getElementById('connection').dataset.state,
  products: all(document, '#products tr').map((row) => [...row.children].map(text)),
  nothingPending: visible(document.getElementById('nothing-pending')),
  pending: all(document, '#pending tr').filter(visible).map((row) => ({
    claim: row.dataset.claim,
    pods: text(row.children[1]),
    reason: text(row.querySelector('.code')),
    message: row.children[3].childNodes[1].textContent.slice(2),
    changes: all(row.children[4], 'li').map(text),
    holders: all(row.children[5], 'button').map(text),
  })),
  evictions: all(document, '#evictions tr').map((row) => [...row.children].map(text)),
  nodes: all(document, '.node').filter(visible).map((node) => ({
    name: node.dataset.node,
    states: all(node, '.state').map(text),
    notes: all(node, '.note').map(text),
    gpus: all(node, '.gpu').map((gpu) => ({
      number: Number(gpu.dataset.gpu),
      spans: all(gpu, '.span').map((span) => ({
        state: span.dataset.state, claim: span.dataset.claim ?? null, title: span.title,
      })),
    })),
  })),
  detail: all(document, '#detail .root').map((root) => ({
    root: root.dataset.root,
    gpus: all(root, '[data-gpu]').map((gpu) => Number(gpu.dataset.gpu)),
    others: all(root, '[data-device]').map((each) => each.dataset.device),
    text: text(root),
  })),
};
"""
"""What the page shows, from its elements."""


@contextmanager
def browser() -> Iterator[Chrome]:
    """A headless Chromium, which is installed if it is missing."""
    ensure_packages(Progress(), BROWSER)
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, Service("/usr/bin/chromedriver"))
    try:
        yield driver
    finally:
        driver.quit()


class WebPage:
    """The page in one browser."""

    def __init__(self, driver: Chrome, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self) -> None:
        self.driver.get(self.url)

    def open_live(self) -> None:
        """Open it and wait until it shows the cluster."""
        self.open()
        self.wait(lambda shown: shown["connection"] == "live" and shown["nodes"], "the page shows the cluster")

    def shown(self) -> Shown:
        found: Shown = self.driver.execute_script(READ)
        return found

    def wait(self, test: Any, what: str) -> Shown:
        """What is shown once it passes ``test``."""
        last: list[Shown] = []

        def passes() -> bool:
            last.append(self.shown())
            return bool(test(last[-1]))

        wait_for(passes, SOON_S, what)
        return last[-1]

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def search(self, text: str) -> None:
        self.find("#search").send_keys(Keys.CONTROL, "a")
        self.find("#search").send_keys(Keys.BACKSPACE, text)

    def says(self, selector: str, text: str) -> bool:
        return text in self.find(selector).text

    def open_detail(self, node: str) -> None:
        self.find(f'[data-node="{node}"] button').click()

    def close_detail(self) -> None:
        self.find("#detail-close").click()

    def colours(self, scheme: str) -> None:
        """Prefer ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def complaints(self) -> list[str]:
        """What the browser has logged since the last call: errors of the page, and what its policy refused."""
        return [str(each["message"]) for each in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]


def devices_in(shown: Shown, state: str) -> dict[tuple[str, str], str | None]:
    """Node and device of what the page shows in ``state``, with the claim that holds it."""
    found: dict[tuple[str, str], str | None] = {}
    for node in shown["nodes"]:
        for span in (span for gpu in node["gpus"] for span in gpu["spans"] if span["state"] == state):
            named = re.search(r"\(([^()]+)\)$", span["title"])
            assert named is not None, span
            found |= {(node["name"], device): span["claim"] for device in named[1].split(", ")}
    return found
