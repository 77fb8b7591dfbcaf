"""The files that people install and edit: classes, examples, the admission policy, and what the docs say of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from driver.config.opaque import GpuConfig, MigDeviceConfig, ShareConfig, parse_parameters
from driver.hardware.simulator.products import Product, find_product, product_names
from tests.support.chart import CLASS_FILES, rendered

PROJECT = Path(__file__).parents[2]
EXAMPLES = sorted((PROJECT / "deploy" / "examples").glob("*.yaml"))
DOCS = (PROJECT / "docs" / "workloads.md").read_text()

GUARD = 'device.driver == "gpu.tessera.dev" && device.attributes["gpu.tessera.dev"]'
PARTITIONS = "gpu-inference"
ONE_SHARE = "one-share-of-a-gpu.gpu.tessera.dev"
OF_ANOTHER_DRIVER = {"rdma-nic"}
QUOTA_KEY = ".deviceclass.resource.k8s.io/devices"

KINDS = {
    "gpu-training": ("gpu", GpuConfig),
    "gpu-inference": ("mig", MigDeviceConfig),
    "gpu-dev": ("share", ShareConfig),
}

NAMES = [file.stem for file in CLASS_FILES]
PROFILE_FILES = [file for file in CLASS_FILES if file.stem.startswith(f"{PARTITIONS}-")]


def name_of(file: Path) -> str:
    return file.stem


def profile_of(file: Path) -> str:
    """``gpu-inference-1g-10gb`` is for 1g.10gb."""
    return file.stem.removeprefix(f"{PARTITIONS}-").replace("-", ".")


def load(file: Path) -> dict[str, Any]:
    [content] = yaml.safe_load_all(file.read_text())
    assert isinstance(content, dict)
    return content


def walk(content: object) -> Iterator[dict[str, Any]]:
    """Every object inside ``content``."""
    if isinstance(content, dict):
        yield content
    for part in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from walk(part)


def parameters_in(content: object) -> list[dict[str, Any]]:
    return [each["opaque"]["parameters"] for each in walk(content) if "opaque" in each]


def products() -> list[Product]:
    found = (find_product(name) for name in product_names())
    return [product for product in found if product is not None]


def named(card: str) -> list[Product]:
    """The products of which people speak as ``card``: every word of it is a word of theirs."""
    wanted = set(card.split())
    names = (name for name in product_names() if wanted <= set(re.split(r"[^A-Za-z0-9]+", name)))
    return [product for product in map(find_product, names) if product is not None]


@pytest.mark.parametrize("file", CLASS_FILES, ids=name_of)
def test_a_file_holds_the_class_it_is_named_after(file: Path) -> None:
    content = load(file)
    assert (content["apiVersion"], content["kind"]) == ("resource.k8s.io/v1", "DeviceClass")
    assert content["metadata"] == {"name": file.stem}
    assert content["spec"].keys() == {"selectors", "config"}


@pytest.mark.parametrize("file", CLASS_FILES, ids=name_of)
def test_a_class_selects_what_its_name_says_by_one_guarded_expression(file: Path) -> None:
    [selector] = load(file)["spec"]["selectors"]
    wanted = f'type == "{KINDS[file.stem][0]}"' if file.stem in KINDS else f'profile == "{profile_of(file)}"'
    assert selector == {"cel": {"expression": f"{GUARD}.{wanted}"}}


@pytest.mark.parametrize("file", CLASS_FILES, ids=name_of)
def test_a_class_carries_parameters_of_its_kind_of_device(file: Path) -> None:
    [parameters] = parameters_in(load(file))
    _, kind = KINDS[file.stem if file.stem in KINDS else PARTITIONS]
    assert type(parse_parameters(parameters, file.stem)) is kind


@pytest.mark.parametrize("file", CLASS_FILES, ids=name_of)
def test_a_class_says_for_whom_it_is_what_it_promises_and_what_not(file: Path) -> None:
    head = file.read_text().partition("apiVersion")[0]
    assert all(line.startswith("# ") for line in head.splitlines())
    for said in (" for ", "Promises: ", "not promise: "):
        assert said in head


@pytest.mark.parametrize("file", PROFILE_FILES, ids=name_of)
def test_the_cards_that_a_file_names_have_its_profile_as_often_as_it_says(file: Path) -> None:
    [cards] = re.findall(r"Cards that have it: (.*)\.\n", file.read_text())
    for group in cards.split("; "):
        names, number = re.fullmatch(r"(.*) \((\d) a GPU\)", group).groups()  # type: ignore[union-attr]
        for card in names.split(", "):
            assert named(card), card
            assert {product.by_name[profile_of(file)].max_instances for product in named(card)} == {int(number)}


def test_every_partition_of_the_common_cards_has_a_class() -> None:
    cards = ("A30", "A100 40GB", "A100 80GB", "H100 80GB", "H200", "B200")
    profiles = {name for card in cards for product in named(card) for name in product.by_name}
    # Media engines are for who asks by selector.
    plain = {name for name in profiles if name.isalnum() or re.fullmatch(r"\dg\.\d+gb", name)}
    assert {profile_of(file) for file in PROFILE_FILES} == plain


def test_the_resource_name_for_unchanged_pods_is_there_and_off() -> None:
    names = {"gpu-training": "nvidia.com/gpu", "gpu-dev": "nvidia.com/gpu.shared"}
    names |= {file.stem: f"nvidia.com/mig-{profile_of(file)}" for file in PROFILE_FILES}
    switched_on = {}
    for file in CLASS_FILES:
        text = file.read_text().replace("# extendedResourceName", "extendedResourceName")
        switched_on[file.stem] = yaml.safe_load(text)["spec"].get("extendedResourceName")
    assert switched_on == {**names, PARTITIONS: None}


@pytest.mark.parametrize("file", EXAMPLES, ids=name_of)
def test_an_example_names_only_what_exists(file: Path) -> None:
    documents = list(yaml.safe_load_all(file.read_text()))
    classes = {
        each["deviceClassName"] for document in documents for each in walk(document) if "deviceClassName" in each
    }
    assert classes <= {*NAMES, *OF_ANOTHER_DRIVER}
    for parameters in parameters_in(documents):
        parse_parameters(parameters, file.stem)
    templates = {each["metadata"]["name"] for each in documents if each["kind"] == "ResourceClaimTemplate"}
    used = {each["resourceClaimTemplateName"] for each in walk(documents) if "resourceClaimTemplateName" in each}
    assert used == templates


def test_the_quota_example_has_a_line_for_every_class() -> None:
    quotas = list(yaml.safe_load_all((PROJECT / "deploy" / "examples" / "quota.yaml").read_text()))
    keys = [key for quota in quotas for key in quota["spec"]["hard"]]
    assert sorted(keys) == sorted(f"{name}{QUOTA_KEY}" for name in NAMES)


def test_the_admission_policy_knows_every_class_of_shares() -> None:
    policy, binding = (each for each in rendered() if each["metadata"]["name"] == ONE_SHARE)
    expressions = {each["name"]: each["expression"] for each in policy["spec"]["variables"]}
    shares = [name for name, (kind, _) in KINDS.items() if kind == "share"]
    assert yaml.safe_load(expressions["classes"]) == shares
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}


class TestTheDocs:
    def test_describe_every_class(self) -> None:
        profiles = {
            name
            for row in re.findall(r"^\| [AHB].*`\dg-.*$", DOCS, re.MULTILINE)
            for name in re.findall(r"`(\dg-\d+gb)`", row)
        }
        assert {f"{PARTITIONS}-{name}" for name in profiles} | KINDS.keys() == set(NAMES)
        for name in KINDS:
            assert f"`{name}`" in DOCS

    def test_list_each_profile_under_the_cards_that_have_it(self) -> None:
        rows = re.findall(r"^\| ([AHB][^|]*) \| (`\dg-[^|]*) \|$", DOCS, re.MULTILINE)
        assert rows
        for cards, classes in rows:
            for product in (product for card in cards.split(", ") for product in named(card)):
                wanted = [name.replace(".", "-") for name in product.by_name if re.fullmatch(r"\dg\.\d+gb", name)]
                assert sorted(re.findall(r"`([^`]+)`", classes)) == sorted(wanted)

    def test_show_every_example(self) -> None:
        for file in EXAMPLES:
            assert f"{file.name}`" in DOCS

    def test_show_parameters_and_objects_that_are_valid(self) -> None:
        blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)]
        found = [parameters for block in blocks for parameters in parameters_in(block)]
        assert found
        for parameters in found:
            parse_parameters(parameters, "docs/workloads.md")

    @pytest.mark.parametrize("kind", [GpuConfig, MigDeviceConfig, ShareConfig])
    def test_name_every_kind_of_parameters(self, kind: type[GpuConfig | MigDeviceConfig | ShareConfig]) -> None:
        assert f"| `{kind.kind}` |" in DOCS
