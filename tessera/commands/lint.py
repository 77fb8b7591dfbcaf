"""``tessera lint``: finds errors in classes and claims in files, before they are applied.

The CEL engine is loaded only when the command runs, because ``tessera --help`` loads this module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

import click

from deviceclasses.chart_classes import chart_classes
from deviceclasses.lint.documents import Document, kind_of, nothing_to_check, read_documents
from deviceclasses.lint.findings import Finding
from driver.config.shared_flags import DEFAULT_DRIVER
from tessera.tables_and_drawings import columns, counted, show, with_output


@click.command()
@click.argument("paths", metavar="FILE...", nargs=-1, required=True)
@click.option("--driver-name", default=DEFAULT_DRIVER, show_default=True, help="DRA driver name and attribute domain.")
@click.option("--kueue", is_flag=True, help="Check Kueue's Configuration, queues and queued jobs, too.")
@with_output("table", "json")
def lint(paths: Sequence[str], driver_name: str, kueue: bool, output: str) -> None:
    """Check DeviceClasses, ResourceClaims and ResourceClaimTemplates in YAML or JSON files.

    FILE may be a folder (all .yaml, .yml and .json files below it) or - for standard input. Exit code 0: nothing found;
    1: findings, warnings among them; 2: usage. With --kueue the files may hold Kueue's Configuration, ClusterQueues,
    LocalQueues and jobs of any kind; give them together, because they refer to each other (docs/queues.md).

    \b
    Examples:
      tessera lint class.yaml claim.yaml
      tessera lint deploy/examples -o json
      tessera lint --kueue kueue-config.yaml queues.yaml job.yaml
      helm template --kube-version 1.37 deploy/tessera | tessera lint -
    """
    from deviceclasses.lint.class_and_claim_rules import lint as check

    read = [part for path in paths for part in read_documents(path)]
    documents = [part for part in read if isinstance(part, Document)]
    unreadable = [part for part in read if not isinstance(part, Document)]
    findings = [*unreadable, *check(documents, chart_classes(driver_name), driver_name)]
    objects = sum(kind_of(document.content) is not None for document in documents)
    if kueue:
        from deviceclasses.lint.kueue_rules import is_checked, lint_kueue

        findings += lint_kueue(documents, chart_classes(driver_name), driver_name)
        objects += sum(kind_of(document.content) is None and is_checked(document.content) for document in documents)
    if not objects and not unreadable:
        findings.append(nothing_to_check(paths, documents))
    show(output, [asdict(finding) for finding in findings], as_text(findings, objects))
    sys.exit(1 if findings else 0)


def as_text(findings: Sequence[Finding], objects: int) -> str:
    if not findings:
        return f"{counted(objects, 'object')} checked, nothing found"
    header = ("SEVERITY", "FILE", "DOCUMENT", "OBJECT", "PATH", "VALUE", "MESSAGE")
    rows = []
    for finding in findings:
        place = (finding.file, str(finding.document), finding.object, finding.path)
        rows.append((finding.severity.value, *place, finding.value or "-", finding.message))
    return f"{columns(header, rows)}\n\n{counted(objects, 'object')} checked, {counted(len(findings), 'finding')}"
