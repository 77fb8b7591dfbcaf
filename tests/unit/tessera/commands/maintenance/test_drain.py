"""``tessera drain`` against a server that speaks the API's wire protocol, with a node that follows its plan."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from controller.eviction.recent_evictions import ANNOTATION
from driver.model.plan import PATH
from tessera.cli import main
from tessera.commands.maintenance import drain
from tests.support.api_server import SLICES, Exchange, Object, Route
from tests.support.evictions import NODE, POOL, ClusterApi, allocated
from tests.support.plugin import TESSERA
from tests.support.queues import DRIVER
from tests.support.running import eventually
from tests.unit.controller.eviction.test_failed_starts import owner
from tests.unit.tessera.test_cli import KUBECONFIG

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims"
PODS = "/api/v1/namespaces/team/pods"
FENCED = "/api/v1/namespaces/tessera/configmaps"
BUDGETS = "/apis/policy/v1/namespaces/team/poddisruptionbudgets"
UUIDS = ["GPU-00000000-0000-0000-0000-000000000000", "GPU-00000000-0000-0000-0000-000000000001"]
DELETE = "kubectl delete pod -n team"
STAYS = f"{NODE}/gpu-0 stays cordoned: tessera drain {NODE}/gpu-0 continues, tessera uncordon {NODE}/gpu-0 admits"


class DrainedNode(ClusterApi):
    """A node with two GPUs that taints a cordoned GPU, and releases the devices of claims whose pods have ended."""

    follows, releases = True, True

    def publish(self, *tainted: int) -> None:
        taints = [{"key": "gpu.tessera.dev/cordoned", "effect": "NoSchedule"}]
        devices = [
            {
                "name": name,
                "attributes": {"uuid": {"string": uuid}},
                **({"taints": taints} if number in tainted else {}),
            }
            for number, uuid in enumerate(UUIDS)
            for name in (f"gpu-{number}", f"gpu-{number}-mig-1g10gb-0")
        ]
        pool = {"name": POOL, "generation": 1, "resourceSliceCount": 1}
        self.store(f"{SLICES}/s", spec={"driver": DRIVER, "nodeName": NODE, "pool": pool, "devices": devices})

    def _write(self, exchange: Exchange) -> None:
        route = Route.of(exchange.route)
        if "gpunodeplans" in route.resource and self.follows:
            self.publish(0)
        super()._write(exchange)
        if route.part == "eviction" and self.releases:
            for pod in [name for name in self.evicted if name in self.folder(PODS)]:
                self.end(pod)

    def end(self, pod: str) -> None:
        """The pod is gone: claims without other pods are deallocated."""
        self.drop(f"{PODS}/{pod}")
        for name, claim in [*self.folder(CLAIMS).items()]:
            rest = [user for user in claim["status"]["reservedFor"] if user["name"] != pod]
            if not rest:
                self.drop(f"{CLAIMS}/{name}")
            elif len(rest) < len(claim["status"]["reservedFor"]):
                self.store(f"{CLAIMS}/{name}", status={**claim["status"], "reservedFor": rest})


class Site:
    """A cluster, and the command on it."""

    def __init__(self, api: DrainedNode, kubeconfig: Path) -> None:
        self.api, self.kubeconfig = api, kubeconfig
        server = {"clusters": [{"name": "c", "cluster": {"server": api.server.url}}]}
        kubeconfig.write_text(yaml.safe_dump({**KUBECONFIG, **server}))
        api.store(f"/api/v1/nodes/{NODE}")
        api.publish()

    def claim(self, name: str, device: str, *pods: str, resource: str = "pods", **result: Any) -> None:
        users = [{"resource": resource, "name": pod, "uid": f"uid-of-{pod}"} for pod in pods]
        status = {"allocation": allocated(device, **result), "reservedFor": users}
        self.api.store(f"{CLAIMS}/{name}", status=status)

    def pod(self, name: str, *claims: str, of: Object | None = None, ready: bool = True) -> None:
        """A pod on the node, of the Deployment ``name`` by default; of nothing with an empty ``of``."""
        spec = {"nodeName": NODE, "resourceClaims": [{"name": each, "resourceClaimName": each} for each in claims]}
        owners = [owner(name) if of is None else of] if of is None or of else []
        metadata = {"name": name, "uid": f"uid-of-{name}", "ownerReferences": owners, "labels": {"app": name}}
        conditions = [{"type": "Ready", "status": str(ready)}]
        self.api.store(
            f"{PODS}/{name}", metadata=metadata, spec=spec, status={"phase": "Running", "conditions": conditions}
        )

    def serve(self, name: str, device: str, of: Object | None = None) -> None:
        """A pod with a claim of its own."""
        self.claim(name, device, name)
        self.pod(name, name, of=of)

    def budget(self, app: str, healthy: int, desired: int) -> None:
        status = {"currentHealthy": healthy, "desiredHealthy": desired}
        self.api.store(f"{BUDGETS}/{app}", spec={"selector": {"matchLabels": {"app": app}}}, status=status)

    def drain(self, *flags: str, gpu: str = f"{NODE}/gpu-0") -> Result:
        return CliRunner().invoke(main, ["drain", gpu, "--kubeconfig", str(self.kubeconfig), *flags])

    def cordoned(self) -> list[str]:
        plans = self.api.folder(PATH)
        return plans[NODE]["spec"]["cordoned"] if NODE in plans else []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(drain, "POLL_INTERVAL_SECONDS", 0.01)
    with DrainedNode() as api:
        yield Site(api, tmp_path / "kubeconfig")


def test_pods_that_are_replaced_are_evicted_and_the_gpu_is_free(site: Site) -> None:
    site.serve("serve", "gpu-0-mig-1g10gb-0")
    site.serve("elsewhere", "gpu-1-mig-1g10gb-0")
    site.claim("other-node", "gpu-0-mig-1g10gb-0", "other-node", pool=f"node-z-{DRIVER}")
    site.claim("monitor", "gpu-0", "monitor", adminAccess=True)
    answer = site.drain("--reason", "fan on Friday")
    assert answer.exit_code == 0, answer.output
    assert answer.stdout == f"drained {NODE}/gpu-0 ({UUIDS[0]}): 1 pod evicted\n"
    assert answer.stderr.splitlines()[0] == f"cordoned {NODE}/gpu-0 ({UUIDS[0]})"
    assert "evicted pod team/serve, which used gpu-0-mig-1g10gb-0" in answer.stderr
    assert site.api.evicted == ["serve"]
    assert site.cordoned() == [f"{UUIDS[0]} fan on Friday"]


def test_a_dry_run_changes_nothing_and_says_what_would_happen(site: Site) -> None:
    site.serve("serve", "gpu-0-mig-1g10gb-0")
    site.serve("bare", "gpu-0-mig-1g10gb-1", of={})
    answer = site.drain("--dry-run")
    assert answer.exit_code == 1
    header, bare, serve, remedy = answer.stdout.splitlines()
    assert header.split() == ["CLAIM", "DEVICES", "PODS", "RESULT"]
    assert bare.startswith("team/bare   gpu-0-mig-1g10gb-1  team/bare   stay: it has no controller")
    assert serve == "team/serve  gpu-0-mig-1g10gb-0  team/serve  would be evicted"
    assert remedy == f"  team/bare: delete it when it has done its work: {DELETE} bare"
    assert (site.api.writes, site.api.evicted, answer.stderr) == ([], [], "")
    site.api.end("bare")
    assert site.drain("--dry-run").exit_code == 0
    site.api.end("serve")
    assert site.drain("--dry-run").stdout == f"no claim has a device of {NODE}/gpu-0 ({UUIDS[0]})\n"


def test_a_pod_that_stays_is_named_and_a_second_drain_continues_after_it_is_gone(site: Site) -> None:
    site.serve("serve", "gpu-0-mig-1g10gb-0")
    site.serve("bare", "gpu-0-mig-1g10gb-1", of={})
    answer = site.drain("--reason", "fan")
    assert answer.exit_code == 1
    assert "stay: it has no controller that would replace it" in answer.stdout
    assert f"{NODE}/gpu-0 is still in use: 1 claim; {STAYS}" in answer.stderr
    site.api.end("bare")
    again = site.drain()
    assert (again.exit_code, again.stdout) == (0, f"drained {NODE}/gpu-0 ({UUIDS[0]}): 0 pods evicted\n")
    assert site.api.evicted == ["serve"]
    assert site.cordoned() == [f"{UUIDS[0]} fan"]


def one_of(kind: str) -> Callable[[Site], None]:
    return lambda site: site.serve("work", "gpu-0", of={**owner("work", kind)} if kind else {})


def of_job(site: Site) -> None:
    site.serve("work", "gpu-0", of=owner("train", "Job"))
    site.api.store("/apis/batch/v1/namespaces/team/jobs/train", spec={"backoffLimit": 0}, status={})


def with_admin_access(site: Site) -> None:
    site.serve("work", "gpu-0")
    results = allocated("gpu-0")["devices"]["results"] + allocated("gpu-1", adminAccess=True)["devices"]["results"]
    users = [{"resource": "pods", "name": "work", "uid": "uid-of-work"}]
    site.api.store(f"{CLAIMS}/work", status={"allocation": {"devices": {"results": results}}, "reservedFor": users})


@pytest.mark.parametrize(
    ("prepare", "reason", "remedy"),
    [
        (
            one_of(""),
            "it has no controller that would replace it",
            f"delete it when it has done its work: {DELETE} work",
        ),
        (one_of("DaemonSet"), "a pod of a DaemonSet would come back here", "its next pod gets another GPU"),
        (of_job, "Job train would count it as a failure and has no retries left", "let it end, or delete it"),
        (with_admin_access, "it has adminAccess", f"end it: {DELETE} work"),
        (lambda site: site.claim("work", "gpu-0", "gang", resource="podgroups"), "reserved for podgroups/gang", ""),
    ],
)
def test_a_pod_that_must_not_be_evicted_stays_at_once_and_its_admin_is_told_what_to_do(
    site: Site, prepare: Callable[[Site], None], reason: str, remedy: str
) -> None:
    prepare(site)
    answer = site.drain("-o", "json")
    assert answer.exit_code == 1
    [facts] = json.loads(answer.stdout)
    [claims] = facts["claims"]
    assert (claims["claims"], claims["devices"], claims["state"]) == (["team/work"], ["gpu-0"], "Protected")
    assert reason in claims["reason"]
    assert remedy in claims["remedy"]
    assert facts["evicted"] == site.api.evicted == []


def test_pods_that_share_claims_are_evicted_together_or_not_at_all(site: Site) -> None:
    site.claim("shared", "gpu-0-mig-1g10gb-0", "first", "second")
    site.claim("own", "gpu-0-mig-1g10gb-1", "second")
    site.claim("both", "gpu-0-mig-1g10gb-2", "a", "b")
    site.pod("first", "shared", of={})
    site.pod("second", "shared", "own")
    site.pod("a", "both")
    site.pod("b", "both")
    answer = site.drain()
    assert answer.exit_code == 1
    assert sorted(site.api.evicted) == ["a", "b"]
    assert "team/own, team/shared" in answer.stdout
    assert f"{DELETE} first\n" in answer.stdout
    site.api.protected["second"] = 429
    site.pod("first", "shared")
    assert site.drain("--timeout", "0.2").exit_code == 1
    assert sorted(site.api.evicted) == ["a", "b"]


def test_an_owner_loses_two_pods_an_hour_and_a_dry_run_counts_them_too(site: Site) -> None:
    for number in range(3):
        site.serve(f"serve-{number}", f"gpu-0-mig-1g10gb-{number}", of=owner("serve"))
    dry = site.drain("--dry-run")
    assert (dry.exit_code, dry.stdout.count("would be evicted")) == (1, 2)
    answer = site.drain()
    assert answer.exit_code == 1
    assert site.api.evicted == ["serve-0", "serve-1"]
    assert "ReplicaSet serve loses at most 2 pods an hour in this way, and has lost 2" in answer.stdout
    assert "drain the GPU again in an hour" in answer.stdout
    record = json.loads(site.api.folder(FENCED)["tessera-fence"]["metadata"]["annotations"][ANNOTATION])
    assert [pod for pod, *_ in record["evictions"]] == ["uid-of-serve-0", "uid-of-serve-1"]


def test_a_disruption_budget_holds_until_another_pod_is_ready(site: Site) -> None:
    site.serve("serve", "gpu-0")
    site.budget("serve", healthy=1, desired=1)
    answer = site.drain("--timeout", "0.2")
    assert answer.exit_code == 1
    assert "not now: PodDisruptionBudget serve forbids it" in answer.stdout
    assert "kubectl get poddisruptionbudgets -n team" in answer.stdout
    assert "waiting for team/serve (PodDisruptionBudget serve forbids it)" in answer.stderr
    site.budget("serve", healthy=2, desired=1)
    assert site.drain().exit_code == 0


@pytest.mark.parametrize(("status", "verdict"), [(429, "not now: "), (403, "stay: ")])
def test_the_answer_of_the_api_server_is_shown_where_it_refuses_an_eviction(
    site: Site, status: int, verdict: str
) -> None:
    site.serve("serve", "gpu-0")
    site.api.protected["serve"] = status
    answer = site.drain("--timeout", "0.2")
    assert answer.exit_code == 1
    assert f"{verdict}POST {PODS}/serve/eviction: {status}: refused for now" in answer.stdout


def test_before_the_node_follows_the_cordon_no_pod_is_evicted(site: Site) -> None:
    """Its controller's next pod could get the same GPU."""
    site.api.follows = False
    site.serve("serve", "gpu-0")
    answer = site.drain("--timeout", "0.2")
    assert answer.exit_code == 1
    assert f"the node plugin of {NODE} has not followed the cordon within 0.2 s" in answer.stderr
    assert STAYS in answer.stderr
    assert site.api.evicted == []


def test_where_devices_have_no_taints_the_cordon_is_followed_when_the_free_ones_are_gone(site: Site) -> None:
    site.api.follows = False
    site.api.store(f"{PATH}/{NODE}", spec={}, status={"dropped": ["taints"]})
    site.serve("serve", "gpu-0")
    assert "has not followed the cordon" in site.drain("--timeout", "0.2").stderr
    spec = site.api.folder(SLICES)["s"]["spec"]
    site.api.store(f"{SLICES}/s", spec={**spec, "devices": spec["devices"][:1]})
    assert site.drain().exit_code == 0


def test_devices_that_are_not_released_in_time_are_listed_with_what_the_node_reports(site: Site) -> None:
    site.api.releases = False
    site.serve("serve", "gpu-0")
    report = {"claim": "team/serve", "uid": "u", "since": "2026-11-28T00:00:00Z", "cause": "GPU", "message": "in use"}
    site.api.store(f"{PATH}/{NODE}", spec={}, status={"unreleased": [report]})
    answer = site.drain("--timeout", "0.2")
    assert answer.exit_code == 1
    assert f"being released: node {NODE} can't release it: in use" in answer.stdout


def test_an_api_server_that_does_not_answer_for_a_moment_does_not_end_a_drain(site: Site) -> None:
    site.serve("serve", "gpu-0")
    before = site.api.publish

    def overloaded(*tainted: int) -> None:
        before(*tainted)
        site.api.once("list", lambda exchange: exchange.refuse(503, "overloaded"))
        site.api.once("get", lambda exchange: exchange.refuse(503, "overloaded"))

    site.api.publish = overloaded  # type: ignore[method-assign]
    answer = site.drain()
    assert answer.exit_code == 0, answer.output


@pytest.mark.long
def test_ctrl_c_leaves_the_gpu_cordoned_and_says_how_to_continue_and_how_to_undo_it(site: Site) -> None:
    site.api.follows = False
    command = [str(TESSERA), "drain", f"{NODE}/gpu-0", "--kubeconfig", str(site.kubeconfig)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "to follow the cordon" in line:
                break
        eventually(site.cordoned, "the cordon is written")
        process.send_signal(signal.SIGINT)
        stderr = process.stderr.read()
    assert process.returncode == 1
    assert f"tessera: interrupted; {STAYS}" in stderr
    assert len(site.cordoned()) == 1
