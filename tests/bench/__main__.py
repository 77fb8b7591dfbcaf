"""``python -m tests.bench``, or ``make bench``."""

from __future__ import annotations

from pathlib import Path

import click

from tests.bench import cel, claim_usage, cluster_map, discovery, pods, prepare, process, web_page
from tests.bench.results import Figure, machine, table, write
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.support.chart import install


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--binaries", type=click.Path(path_type=Path), envvar=["TESSERA_BINARIES", "KUBEBUILDER_ASSETS"])
@click.option("--output", type=click.Path(path_type=Path), default="bench-results.json", show_default=True)
@click.option("--name", default="bench", show_default=True, help="Of the cluster that is made for it.")
def main(binaries: Path | None, output: Path, name: str) -> None:
    """Measure the node plugin against a real API server; print a table and write it as JSON.

    PEER is NVIDIA's Go driver, measured on the same kind of machine (2 cores) with the same client work.
    """
    progress = Progress()
    with Cluster.start(Settings(name=name, nodes=1, binaries=binaries), progress) as cluster:
        install(cluster)
        figures = _measure(cluster, progress)
    click.echo(table(figures))
    write(figures, output)
    click.echo(f"measured on {machine()}; written to {output}")


def _measure(cluster: Cluster, progress: Progress) -> list[Figure]:
    where = machine()
    return [
        *prepare.figures(cluster, progress, where),
        Figure("discovery.8gpus_ms", discovery.discovery_ms(), "ms", 150, None, where),
        *process.figures(cluster, progress, where),
        *claim_usage.figures(cluster, progress, where),
        *pods.figures(cluster, progress, where),
        Figure("cel.new_shape_p50_ms", cel.new_shape_ms(), "ms", 1, None, where),
        Figure("cel.fleet_verdicts_s", cel.fleet_s(), "s", 1, None, where),
        Figure("map.1000nodes_s", cluster_map.summary_s(), "s", 2, None, where),
        *web_page.figures(where),
    ]


if __name__ == "__main__":
    main()
