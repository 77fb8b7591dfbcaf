"""The HTTP servers of a process: metrics and health at the addresses that settings name, one server an address."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from driver.config.listen import ListenAddress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver.checks import Check
    from driver.web import Page

Pages = tuple[str, ListenAddress | None, "Callable[[], Mapping[str, Page]]"]
"""The flag that gave the address, the address (None: not wanted), and what makes the pages."""


def health_pages(live: Sequence[Check], ready: Sequence[Check]) -> Mapping[str, Page]:
    """``/livez`` and ``/readyz``."""
    from driver.check_pages import check_pages

    return check_pages(live, ready)


def serve(stack: ExitStack, wanted: Iterable[Pages]) -> None:
    """Answer from now until ``stack`` is unwound. Raises EnvironmentFault where an address can't be had."""
    found: dict[ListenAddress, dict[str, Page]] = {}
    flags: dict[ListenAddress, list[str]] = {}
    for flag, address, pages in wanted:
        if address is not None:
            found.setdefault(address, {}).update(pages())
            flags.setdefault(address, []).append(flag)
    for address, pages_there in found.items():
        from driver.web import Endpoint  # http.server and its kin, for those who want them

        stack.callback(Endpoint(pages_there, address, " and ".join(flags[address])).close)
