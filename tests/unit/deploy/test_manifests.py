"""The files that people install and edit: classes, examples, the admission policy, and what the docs say of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from controller.eviction.gpu_policy import EvictionBudget, PolicySpec, PreemptionRules, QuietHours, ReclaimRules
from deviceclasses.cel.engine import Program, compile_selector, from_slice_device
from driver.config.opaque_parameters import GpuConfig, MigDeviceConfig, ShareConfig, parse_parameters
from driver.hardware.gpu_properties import known_memory
from driver.model.device import Monitor, devices_of
from driver.model.gpu_settings import SharedProfiles
from driver.model.offer import DeviceKind
from driver.model.shared_memory import SharedMemory, SharingStrategy
from driver.simulator.products import Product, find_product, product_names
from driver.slices.build import PublishedGpu, SliceBuilder
from driver.slices.slice_names import Pool
from tests.support.chart import EVENTS_OF_ALL_CLAIMS, EVENTS_OF_ONE_CLAIM, class_texts, manifests, notes, rendered
from tests.support.gpus import gpu_of
from tests.support.nvml_client import profiles_by_name
from tests.support.published import DRIVER, devices_in

PROJECT = Path(__file__).parents[3]
EXAMPLES = sorted((PROJECT / "deploy" / "examples").glob("*.yaml"))
DOCS = (PROJECT / "docs" / "workloads.md").read_text()

GUARD = 'device.driver == "gpu.tessera.dev" && device.attributes["gpu.tessera.dev"]'
PARTITIONS, MONITORS, NVLINK, SHARED = "gpu-inference", "gpu-monitor", "gpu-training-nvlink", "gpu-shared"
COMPUTE_INSTANCES = "gpu-compute-instance"
WITHOUT_PARAMETERS = {MONITORS, SHARED, COMPUTE_INSTANCES}
ONE_SHARE = "one-share-of-a-gpu.gpu.tessera.dev"
OF_ANOTHER_DRIVER = {"rdma-nic"}
PLAIN_PROFILE = re.compile(r"\dg\.\d+gb")
"""Profiles with a class; others, such as those with media engines, are selected by attribute."""
QUOTA_KEY = ".deviceclass.resource.k8s.io/devices"

KINDS = {
    "gpu-training": ("gpu", GpuConfig),
    NVLINK: ("gpu", GpuConfig),
    "gpu-inference": ("mig", MigDeviceConfig),
    "gpu-dev": ("share", ShareConfig),
    SHARED: ("shared", None),
    COMPUTE_INSTANCES: ("mig-shared", None),
    "gpu-monitor": ("monitor", None),
}

CLASSES = class_texts()
PROFILE_CLASSES = [name for name in CLASSES if name.startswith(f"{PARTITIONS}-")]


def name_of(file: Path) -> str:
    return file.stem


def profile_of(name: str) -> str:
    """``gpu-inference-1g-10gb`` is for 1g.10gb."""
    return name.removeprefix(f"{PARTITIONS}-").replace("-", ".")


def load(name: str) -> dict[str, Any]:
    [content] = yaml.safe_load_all(CLASSES[name])
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
    """The products of which people speak as ``card``: every word of it is a word of theirs, or says their memory."""
    wanted = set(card.split())
    return [
        product
        for product in products()
        if wanted <= {*re.split(r"[^A-Za-z0-9]+", product.name), f"{ceil(product.memory_mib / 1024)}GB"}
    ]


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_an_object_of_the_current_api(name: str) -> None:
    content = load(name)
    assert (content["apiVersion"], content["kind"]) == ("resource.k8s.io/v1", "DeviceClass")
    assert content["metadata"] == {"name": name}
    assert content["spec"].keys() == {"selectors", "config"} - ({"config"} if name in WITHOUT_PARAMETERS else set())


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_selects_what_its_name_says_by_one_guarded_expression(name: str) -> None:
    [selector] = load(name)["spec"]["selectors"]
    wanted = f'type == "{KINDS[name][0]}"' if name in KINDS else f'profile == "{profile_of(name)}"'
    more = ' && "nvlinkClique" in device.attributes["gpu.tessera.dev"]' if name == NVLINK else ""
    assert selector == {"cel": {"expression": f"{GUARD}.{wanted}{more}"}}


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in WITHOUT_PARAMETERS])
def test_a_class_carries_parameters_of_its_kind_of_device(name: str) -> None:
    [parameters] = parameters_in(load(name))
    _, kind = KINDS[name if name in KINDS else PARTITIONS]
    assert type(parse_parameters(parameters, name)) is kind


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_states_its_use_what_it_guarantees_and_what_not(name: str) -> None:
    head = CLASSES[name].partition("apiVersion")[0]
    assert all(line.startswith("# ") for line in head.splitlines())
    for said in (" for ", "Guaranteed: ", "Not guaranteed: "):
        assert said in head


@pytest.mark.parametrize("name", PROFILE_CLASSES)
def test_the_cards_that_a_class_names_have_its_profile_as_often_as_it_says(name: str) -> None:
    [cards] = re.findall(r"GPUs with this profile: (.*)\.\n", CLASSES[name])
    for group in cards.split("; "):
        names, number = re.fullmatch(r"(.*) \((\d) a GPU\)", group).groups()  # type: ignore[union-attr]
        for card in names.split(", "):
            assert named(card), card
            assert {profiles_by_name(product)[profile_of(name)].max_instances for product in named(card)} == {
                int(number)
            }


@cache
def selectors() -> dict[str, Program]:
    """The expression of each class, compiled."""
    return {name: compile_selector(load(name)["spec"]["selectors"][0]["cel"]["expression"]) for name in CLASSES}


def products_of(class_name: str, requirements: dict[str, Any]) -> set[str]:
    """The products that have a device of this class in a release with these ``requirements`` of it."""
    text = manifests({"classRequirements": {class_name: requirements}})["classes.yaml"]
    [rendered] = [item for item in yaml.safe_load_all(text) if item and item["metadata"]["name"] == class_name]
    programs = [compile_selector(selector["cel"]["expression"]) for selector in rendered["spec"]["selectors"]]
    builder, matching = SliceBuilder(Pool("n", DRIVER)), set()
    for product in product_names():
        gpu = gpu_of(product)
        memory, facts = known_memory(product, gpu.memory_bytes), find_product(product)
        assert memory
        assert facts
        gpu = replace(
            gpu,
            cuda_compute_capability=f"{facts.compute_capability[0]}.{facts.compute_capability[1]}.0",
            memory_type=memory.kind,
            memory_bandwidth=memory.bandwidth,
            nvlink_clique="clique-0" if "SXM" in product or "HBM3" in product else None,
        )
        by_memory = SharedMemory(SharingStrategy.TIME_SLICING, gpu.memory_bytes)
        built = builder.build([PublishedGpu(gpu, 0, (), devices_of(gpu, 0, shares=2, shared=by_memory))])
        devices = [
            from_slice_device(DRIVER, device) for device in devices_in({"spec": part} for part in built.values())
        ]
        matching |= {product for device in devices if all(program.verdict(device) is True for program in programs)}
    return matching


@pytest.mark.parametrize(
    ("requirements", "some", "none"),
    [
        ({}, {"Tesla T4", "NVIDIA L4", "NVIDIA H100 80GB HBM3"}, set()),
        ({"memoryTypes": ["HBM3", "HBM3e"]}, {"NVIDIA H100 80GB HBM3", "NVIDIA H200"}, {"Tesla T4", "NVIDIA L4"}),
        ({"memoryBandwidth": 1500}, {"NVIDIA A100-SXM4-40GB", "NVIDIA H200"}, {"Tesla T4", "NVIDIA L4", "NVIDIA L40S"}),
        ({"computeCapability": "8.9"}, {"NVIDIA L4", "NVIDIA H200"}, {"Tesla T4", "NVIDIA A100-SXM4-40GB"}),
        ({"computeCapability": "10.0"}, {"NVIDIA B200"}, {"NVIDIA H200"}),
        ({"nvlink": True}, {"NVIDIA H100 80GB HBM3"}, {"NVIDIA L4", "NVIDIA H100 PCIe"}),
        ({"products": ["NVIDIA L4"]}, {"NVIDIA L4"}, {"NVIDIA L40S", "NVIDIA H200"}),
        ({"products": ["NVIDIA L4"], "memoryTypes": ["HBM3"]}, set(), {"NVIDIA L4", "NVIDIA H200"}),
    ],
)
def test_a_class_gives_only_gpus_that_meet_its_requirements(
    requirements: dict[str, Any], some: set[str], none: set[str]
) -> None:
    matching = products_of("gpu-training", requirements)
    assert some <= matching
    assert not none & matching


def test_claims_share_only_gpus_that_meet_the_requirements_of_their_class() -> None:
    matching = products_of("gpu-shared", {"memoryTypes": ["HBM3", "HBM3e"], "computeCapability": "9.0"})
    assert {"NVIDIA H100 80GB HBM3", "NVIDIA H200"} <= matching
    assert not {"NVIDIA L4", "NVIDIA A100-SXM4-40GB"} & matching


@pytest.mark.parametrize("product", product_names())
def test_every_device_of_a_simulated_product_has_the_class_of_its_kind_and_of_its_profile(product: str) -> None:
    gpu, builder = gpu_of(product), SliceBuilder(Pool("n", DRIVER))
    by_memory = SharedMemory(SharingStrategy.TIME_SLICING, gpu.memory_bytes)
    built = builder.build([PublishedGpu(gpu, 0, (), devices_of(gpu, 0, shares=2, shared=by_memory))])
    monitors = builder.monitors([Monitor.of(gpu, 0)])
    for device in devices_in({"spec": content} for content in (*built.values(), *monitors.values())):
        texts = {name: value.get("string") for name, value in device["attributes"].items()}
        wanted = {name for name, (kind, _) in KINDS.items() if kind == texts["type"]}
        wanted -= set() if "nvlinkClique" in texts else {NVLINK}
        if PLAIN_PROFILE.fullmatch(texts.get("profile") or ""):
            wanted.add(f"{PARTITIONS}-{texts['profile'].replace('.', '-')}")
        value = from_slice_device(DRIVER, device)
        matching = {name for name, program in selectors().items() if program.verdict(value) is True}
        assert matching == wanted != set(), device["name"]


def test_the_resource_name_for_unchanged_pods_is_there_and_off() -> None:
    names = {"gpu-training": "nvidia.com/gpu", "gpu-dev": "nvidia.com/gpu.shared"}
    names |= {name: f"nvidia.com/mig-{profile_of(name)}" for name in PROFILE_CLASSES}
    switched_on = {}
    for name, text in CLASSES.items():
        text = text.replace("# extendedResourceName", "extendedResourceName")
        switched_on[name] = yaml.safe_load(text)["spec"].get("extendedResourceName")
    assert switched_on == {**dict.fromkeys({*KINDS, PARTITIONS}), **names}


@pytest.mark.parametrize("file", EXAMPLES, ids=name_of)
def test_an_example_names_only_what_exists(file: Path) -> None:
    documents = list(yaml.safe_load_all(file.read_text()))
    classes = {
        each["deviceClassName"] for document in documents for each in walk(document) if "deviceClassName" in each
    }
    assert classes <= {*CLASSES, *OF_ANOTHER_DRIVER}
    for parameters in parameters_in(documents):
        parse_parameters(parameters, file.stem)
    templates = {each["metadata"]["name"] for each in documents if each["kind"] == "ResourceClaimTemplate"}
    used = {each["resourceClaimTemplateName"] for each in walk(documents) if "resourceClaimTemplateName" in each}
    assert used == templates


def test_the_quota_example_has_a_line_for_every_class() -> None:
    quotas = list(yaml.safe_load_all((PROJECT / "deploy" / "examples" / "quota" / "quota.yaml").read_text()))
    keys = [key for quota in quotas for key in quota["spec"]["hard"]]
    assert sorted(keys) == sorted(f"{name}{QUOTA_KEY}" for name in CLASSES)


def test_the_admission_policy_knows_every_class_of_shares() -> None:
    policy, binding = (each for each in rendered() if each["metadata"]["name"] == ONE_SHARE)
    expressions = {each["name"]: each["expression"] for each in policy["spec"]["variables"]}
    shares = [name for name, (kind, _) in KINDS.items() if kind == "share"]
    assert yaml.safe_load(expressions["classes"]) == shares
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}


PAGES = {path.name: path.read_text() for path in (PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md")))}
INSTALLING = [
    (page, block, command)
    for page, text in PAGES.items()
    for block in re.findall(r"```\n(.*?)```", text, re.DOTALL)
    for command in re.findall(r"^helm install (?:.*\\\n)*.*$", block, re.MULTILINE)
]

CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)
LINK = re.compile(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)")


def sections(page: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", CODE_BLOCK.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


class TestTheDocs:
    @pytest.mark.parametrize(("page", "block", "command"), INSTALLING, ids=[page for page, _, _ in INSTALLING])
    def test_install_with_an_image_that_nodes_can_get(self, page: str, block: str, command: str) -> None:
        packaged = re.match(r"helm install tessera (oci://\S+|\S+\.tgz) ", command)
        assert packaged or "--set image.repository=" in command or "kind load docker-image tessera:" in block, page

    def test_link_to_pages_and_sections_that_exist(self) -> None:
        for page, text in PAGES.items():
            for target, section in LINK.findall(CODE_BLOCK.sub("", text)):
                file = (PROJECT / ("" if page == "README.md" else "docs") / target).resolve() if target else PROJECT
                assert file.exists(), f"{page}: {target}"
                assert not section or section in sections(PAGES[file.name if target else page]), f"{page}: #{section}"

    def test_are_all_listed_in_the_readme(self) -> None:
        listed = {target.removeprefix("docs/") for target, _ in LINK.findall(PAGES["README.md"])}
        assert PAGES.keys() - {"README.md"} <= listed

    def test_say_how_to_find_out_why_a_pod_waits(self) -> None:
        for text in (PAGES["README.md"], PAGES["workloads.md"], PAGES["controller.md"], notes()):
            assert EVENTS_OF_ONE_CLAIM in text
            assert EVENTS_OF_ALL_CLAIMS in text
        for page, text in {**PAGES, "notes": notes()}.items():
            assert "kubectl describe resourceclaim" not in text, page

    def test_describe_every_class(self) -> None:
        profiles = {
            name
            for row in re.findall(r"^\| [ABGHR].*`\dg-.*$", DOCS, re.MULTILINE)
            for name in re.findall(r"`(\dg-\d+gb)`", row)
        }
        assert {f"{PARTITIONS}-{name}" for name in profiles} | KINDS.keys() == set(CLASSES)
        for name in KINDS:
            assert f"`{name}`" in DOCS

    def test_list_each_profile_under_the_cards_that_have_it(self) -> None:
        rows = re.findall(r"^\| ([ABGHR][^|]*) \| (`\dg-[^|]*) \|$", DOCS, re.MULTILINE)
        assert rows
        for cards, classes in rows:
            for product in (product for card in cards.split(", ") for product in named(card)):
                wanted = [name.replace(".", "-") for name in profiles_by_name(product) if PLAIN_PROFILE.fullmatch(name)]
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
        assert f"| `{kind.__name__}` |" in DOCS


def spec_of(plural: str) -> dict[str, Any]:
    """The schema of the specs of a kind of ours."""
    [definition] = [item for item in rendered() if item["metadata"]["name"] == f"{plural}.gpu.tessera.dev"]
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return dict(schema["properties"]["spec"])


def without_words(schema: dict[str, Any]) -> dict[str, Any]:
    """What a schema refuses."""
    words = {"title", "description", "default", "additionalProperties", "format"}
    return {
        key: {name: without_words(field) for name, field in value.items()} if key == "properties" else value
        for key, value in schema.items()
        if key not in words
    }


def test_the_api_server_takes_the_fields_of_a_policy_that_the_controller_reads() -> None:
    schema = spec_of("gpupolicies")
    read = {field.alias or name for name, field in PolicySpec.model_fields.items()}
    assert schema["properties"].keys() == read
    for part, model in (("preemption", PreemptionRules), ("budget", EvictionBudget)):
        fields = {field.alias or name for name, field in model.model_fields.items()}
        assert schema["properties"][part]["properties"].keys() == fields
    hours = schema["properties"]["quietHours"]["items"]
    assert without_words(hours) == without_words(QuietHours.model_json_schema())
    reclaim = schema["properties"]["reclaim"]
    assert without_words(reclaim) == without_words(ReclaimRules.model_json_schema())
    defaults = {name: field["default"] for name, field in reclaim["properties"].items()}
    assert defaults == ReclaimRules().model_dump(by_alias=True)
    assert schema["properties"]["mode"]["enum"] == list(get_args(PolicySpec.model_fields["mode"].annotation))


def test_the_api_server_takes_a_plan_with_any_offer() -> None:
    pattern = re.compile(spec_of("gpunodeplans")["properties"]["offers"]["items"]["pattern"])
    gpu = SharedProfiles.parse("1c.3g.40gb").applied_to(gpu_of(), {})
    devices = devices_of(gpu, 0, 4, shared=SharedMemory(SharingStrategy.MPS, 80 << 30))
    assert {device.kind for device in devices} == set(DeviceKind)
    assert [str(device.offer) for device in devices if not pattern.search(str(device.offer))] == []
