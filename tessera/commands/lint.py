"""``tessera lint``: finds errors in classes and claims in files, before they are applied.

The CEL engine is loaded only when the command runs, because ``tessera --help`` loads this module.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from deviceclasses.chart_classes import chart_classes
from deviceclasses.lint.documents import Document, kind_of, kind_or_type, nothing_to_check, read_documents, text
from deviceclasses.lint.findings import Finding, Issue
from driver.config.flag_values import DEFAULT_DRIVER
from driver.config.node_configs import CONFIGS_KEY, NODE_CONFIGS, config_faults
from tessera.tables_and_drawings import columns, counted, printable, show, with_output


@click.command()
@click.argument("paths", metavar="FILE...", nargs=-1, required=True)
@click.option("--driver-name", default=DEFAULT_DRIVER, show_default=True, help="DRA driver name and attribute domain.")
@click.option("--kueue", is_flag=True, help="Check Kueue's Configuration, queues and queued jobs, too.")
@with_output("table", "json")
def lint(paths: Sequence[str], driver_name: str, kueue: bool, output: str) -> None:
    """Check DeviceClasses, ResourceClaims, ResourceClaimTemplates, and pods that use them, in YAML or JSON files.

    Settings by node are checked, too: nodeConfigs in chart values, or the ConfigMap tessera-node-configs.
    FILE may be a folder (all .yaml, .yml and .json files below it) or - for standard input. Pods are checked in objects
    of any kind with pod templates. Exit code 0: nothing found; 1: findings, warnings among them; 2: usage. With --kueue
    the files may hold Kueue's Configuration, ClusterQueues, LocalQueues and jobs of any kind; give them together,
    because they refer to each other (docs/queues.md).

    \b
    Examples:
      tessera lint class.yaml claim.yaml
      tessera lint deploy/examples -o json
      tessera lint --kueue kueue-config.yaml queues.yaml job.yaml
      helm template --kube-version 1.37 deploy/tessera | tessera lint -
    """
    from deviceclasses.lint.claim_fields import findings_in
    from deviceclasses.lint.class_and_claim_rules import lint as check
    from deviceclasses.lint.pod_rules import lint_pods, makes_pods

    read = [part for path in paths for part in read_documents(path)]
    documents = [part for part in read if isinstance(part, Document)]
    unreadable = [part for part in read if not isinstance(part, Document)]
    classes = chart_classes(driver_name)
    findings = [*unreadable, *check(documents, classes, driver_name), *lint_pods(documents, classes)]
    findings += findings_in(documents, node_config_issues)
    contents = [document.content for document in documents if document.content is not None]
    skipped = [
        content
        for content in contents
        if kind_of(content) is None and not makes_pods(content) and node_configs(content) is None
    ]
    if kueue:
        from deviceclasses.lint.kueue_rules import is_checked, lint_kueue

        findings += lint_kueue(documents, classes, driver_name)
        skipped = [content for content in skipped if not is_checked(content)]
    if len(skipped) == len(contents) and not unreadable:
        findings.append(nothing_to_check(paths, documents))
    show(output, [asdict(finding) for finding in findings], as_text(findings, len(contents) - len(skipped), skipped))
    sys.exit(1 if findings else 0)


def node_configs(content: object) -> str | None:
    """The configurations of nodes in chart values or in their ConfigMap, as JSON; None: it is something else."""
    if not isinstance(content, Mapping):
        return None
    if "kind" not in content and "nodeConfigs" in content:
        try:
            return json.dumps(content["nodeConfigs"] or [], default=str)
        except (TypeError, ValueError, RecursionError) as error:  # a date as a key, an alias of itself
            return json.dumps(str(error))
    metadata, data = content.get("metadata"), content.get("data")
    is_named = isinstance(metadata, Mapping) and metadata.get("name") == NODE_CONFIGS
    if text(content, "kind") == "ConfigMap" and is_named and isinstance(data, Mapping):
        return text(data, CONFIGS_KEY)
    return None


def node_config_issues(content: Mapping[str, Any]) -> Iterator[Issue]:
    configs = node_configs(content)
    _, faults = config_faults(configs or "")
    yield from (Issue(fault.path, fault.found, fault.message) for fault in faults)


def as_text(findings: Sequence[Finding], objects: int, skipped: Sequence[object] = ()) -> str:
    """``objects`` were checked; ``skipped`` are others."""
    checked = f"{counted(objects, 'object')} checked"
    if skipped:
        kinds = Counter(kind_or_type(content) for content in skipped)
        others = ", ".join(name if count == 1 else f"{count} {name}" for name, count in kinds.items())
        checked += f", {len(skipped)} skipped ({printable(others)})"
    if not findings:
        return f"{checked}, nothing found"
    header = ("SEVERITY", "FILE", "DOCUMENT", "OBJECT", "PATH", "VALUE", "MESSAGE")
    rows = []
    for finding in findings:
        place = (finding.file, str(finding.document), finding.object, finding.path)
        rows.append((finding.severity.value, *place, finding.value or "-", finding.message))
    return f"{columns(header, rows)}\n\n{checked}, {counted(len(findings), 'finding')}"
