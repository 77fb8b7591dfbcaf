"""A cluster: started, used, ended."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from msgspec.structs import replace

from driver.errors import ApiError, UsageError
from tests.harness import cleanup, preflight
from tests.harness.api import Api
from tests.harness.binaries import ensure_binaries
from tests.harness.claim import claim, let_stay
from tests.harness.control_plane import ADMIN, ControlPlane, make_credentials, make_kubelet_credentials
from tests.harness.guard import start_guard
from tests.harness.images import busybox_archive
from tests.harness.kubeconfig import token_user, write_kubeconfig
from tests.harness.layout import BASE
from tests.harness.manifests import node_object, ready_status, starting_status
from tests.harness.node import Node
from tests.harness.progress import SILENT, Progress
from tests.harness.settings import Settings, check_name
from tests.harness.state import ClusterState, cluster_directories, read_state
from tests.harness.versions import KubernetesRelease
from tests.harness.waiting import wait_for

NODE_READY_S = 180.0
POD_S = 120.0
KUBECTL_S = 300.0
TOKEN_S = 24 * 3600


class Cluster:
    """A running cluster. Get one with ``start`` or, made by another process, with ``attach``.

    kubeconfig  the admin's kubeconfig file
    nodes       its real nodes
    api         requests as the admin, without the cost of kubectl (0.1 s of CPU each)
    """

    def __init__(self, state: ClusterState) -> None:
        layout = state.layout
        self._state = state
        self.name = state.name
        self.directory = layout.root
        self.logs_dir = layout.logs
        self.binaries = Path(state.binaries)
        self.release = state.release
        self.server = state.server
        self.kubeconfig = layout.kubeconfig(ADMIN)
        self.nodes = [Node(state, index) for index in range(len(state.nodes))]
        self.api = Api(state.server, state.token, layout.pki / "ca.crt")

    @classmethod
    def start(cls, settings: Settings | None = None, progress: Progress = SILENT) -> Cluster:
        """Start a cluster and return it with all nodes Ready, about 10 seconds later, builds aside.

        What a crashed cluster of the same name left is removed first. Raises UsageError if a cluster of that name
        runs, EnvironmentFault if the machine lacks something or a part does not come up (logs are kept then). Whatever
        is raised, Ctrl-C included, nothing stays behind running.
        """
        settings = settings or Settings()
        preflight.prepare(settings, progress)
        binaries = ensure_binaries(settings.release, progress, settings.binaries, settings.cache)
        state = claim(settings, binaries)
        try:
            start_guard(state)
            cluster = cls(state)
            with progress.part(f"starting cluster {settings.name} with {len(state.nodes)} nodes", 10):
                cluster._bring_up()
            if not settings.ephemeral:
                let_stay(state)
        except BaseException:
            cleanup.destroy(settings.directory, keep_logs=True)
            raise
        return cluster

    @classmethod
    def attach(cls, name: str) -> Cluster:
        """The running cluster of that name, started by whomever; raises UsageError if there is none."""
        check_name(name)
        state = read_state(BASE / name)
        if state is None or not state.in_use():
            running = [folder.name for folder in cluster_directories(BASE) if cleanup.in_use(folder)]
            raise UsageError(f"no cluster {name} runs here; running: {', '.join(running) or 'none'}")
        return cls(state)

    def stop(self) -> None:
        """End it and remove everything it made on this machine; stopping twice is fine."""
        self.api.close()
        cleanup.destroy(self.directory)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # Using it

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl as the admin and return what it printed; raises ApiError with what it complained about."""
        command = [self._state.program("kubectl"), f"--kubeconfig={self.kubeconfig}"]
        command += [f"--cache-dir={self.directory / 'kubectl-cache'}", *arguments]
        answer = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=KUBECTL_S, check=False,
            stdin=None if stdin is not None else subprocess.DEVNULL,
        )  # fmt: skip
        if answer.returncode != 0:
            raise ApiError(f"kubectl {' '.join(arguments)}: {answer.stderr.strip() or answer.stdout.strip()}")
        return answer.stdout

    def apply(self, objects: str | Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> str:
        """``kubectl apply`` of YAML text, of one object or of several; returns kubectl's answer."""
        if isinstance(objects, Mapping):
            objects = [objects]
        if not isinstance(objects, str):
            objects = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        return self.kubectl("apply", "--filename=-", stdin=objects)

    def node(self, name: str) -> Node:
        """The real node of that name; raises UsageError naming those there are."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise UsageError(f"no real node {name}; there are {', '.join(node.name for node in self.nodes) or 'none'}")

    def add_node_object(
        self, name: str, labels: Mapping[str, str] | None = None, capacity: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Add a Node that is Ready but that no kubelet stands behind, for scheduling tests; returns the object.

        The scheduler gives it pods, too, which then stay Pending: pin those that shall run (``busybox_pod(node=...)``).
        """
        self.api.post("/api/v1/nodes", node_object(name, labels))
        node = self.api.patch(f"/api/v1/nodes/{name}/status", ready_status(capacity))
        # Until its controllers have seen it Ready they keep it tainted, and the scheduler away from it.
        return (
            wait_for(lambda: self._ready_node(name) or None, NODE_READY_S, f"node object {name} without taints") or node
        )

    def wait_pod(
        self, name: str, phase: str = "Running", namespace: str = "default", deadline_s: float = POD_S
    ) -> dict[str, Any]:
        """Wait until the pod is in ``phase`` and return it; DeadlineError shows its last status."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        seen: dict[str, Any] = {}

        def arrived() -> bool:
            seen.clear()
            seen.update(self.api.get(path))
            if seen["status"].get("phase") != phase:
                raise ApiError(f"its status is {seen['status']}")
            return True

        wait_for(arrived, deadline_s, f"pod {namespace}/{name} {phase}")
        return seen

    def wait_pod_gone(self, name: str, namespace: str = "default", deadline_s: float = POD_S) -> None:
        """Wait until there is no such pod."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        wait_for(lambda: self._is_gone(path), deadline_s, f"pod {namespace}/{name} gone")

    def service_account_kubeconfig(
        self, namespace: str, name: str, *, node: str | None = None, pod: str | None = None, duration_s: int = TOKEN_S
    ) -> Path:
        """A kubeconfig that speaks as the ServiceAccount, for a process outside of pods; returns its file.

        ``node`` or ``pod`` binds the token to that object, as a pod's own token is: then the API server knows the node
        it comes from. The service account must exist.
        """
        spec: dict[str, Any] = {"expirationSeconds": duration_s}
        if node is not None or pod is not None:
            spec["boundObjectRef"] = self._bound_object(namespace, node, pod)
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = self.api.post(f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", body)
        layout = self._state.layout
        file = layout.kubeconfig("-".join(filter(None, ("sa", namespace, name, node, pod)))[:240])
        return write_kubeconfig(file, self.server, layout.pki / "ca.crt", token_user(answer["status"]["token"]))

    @property
    def control_plane(self) -> ControlPlane:
        """Its parts, for who has to end one and start it anew."""
        return ControlPlane(self._state)

    @property
    def etcd(self) -> str:
        """Where etcd answers, for who puts more objects into it than the API server takes in reasonable time."""
        return f"http://{self._state.addresses.control_plane}:{self._state.control.etcd}"

    def change_release(self, release: KubernetesRelease, progress: Progress = SILENT) -> None:
        """Go on as another release, which must be built or is built now: etcd, containerd and all pods run through.

        The API server comes first in an upgrade, and last in a downgrade: no other part may be newer.
        """
        binaries = ensure_binaries(release, progress)
        newer = _number(release) > _number(self.release)
        self._state = replace(self._state, binaries=str(binaries), release=release)
        self._state.write()
        self.binaries, self.release = binaries, release
        self.nodes = [Node(self._state, index) for index in range(len(self.nodes))]
        steps = [self._restart_control_plane, *(node.restart_kubelet for node in self.nodes)]
        for step in steps if newer else reversed(steps):
            step()
        for node in self.nodes:
            wait_for(lambda name=node.name: self._ready_node(name), NODE_READY_S, f"node {node.name} Ready")  # type: ignore[misc]

    def _restart_control_plane(self) -> None:
        control = self.control_plane
        control.stop()
        control.start_apiserver()
        control.start_controllers()
        control.wait()

    # Starting it

    def _bring_up(self) -> None:
        state, control = self._state, ControlPlane(self._state)
        control.start_etcd()
        for node in self.nodes:
            node.prepare()
            node.spawn_containerd()
        authority = make_credentials(state)
        for node in self.nodes:
            make_kubelet_credentials(state, authority, node.name, node.address)
        archive = state.layout.root / "busybox.tar"
        archive.write_bytes(busybox_archive())
        control.start_apiserver()
        for node in self.nodes:
            node.wait_containerd()
            node.import_image(archive)
        control.start_controllers()
        for node in self.nodes:
            self.api.post("/api/v1/nodes", node_object(node.name))
            self.api.patch(f"/api/v1/nodes/{node.name}/status", starting_status(node.name, node.address))
            node.spawn_kubelet()
        control.wait()
        for node in self.nodes:
            node.wait_kubelet()
            wait_for(lambda name=node.name: self._ready_node(name), NODE_READY_S, f"node {node.name} Ready")  # type: ignore[misc]
        # Without it no pod is admitted.
        default = "/api/v1/namespaces/default/serviceaccounts/default"
        wait_for(lambda: self.api.get(default), NODE_READY_S, "the default service account")

    def _ready_node(self, name: str) -> dict[str, Any]:
        """The node if pods can be scheduled to it; raises ApiError with what stands in the way."""
        node = self.api.get(f"/api/v1/nodes/{name}")
        conditions = {each["type"]: each for each in node["status"].get("conditions", [])}
        taints = node["spec"].get("taints")
        if conditions.get("Ready", {}).get("status") != "True" or taints:
            raise ApiError(f"Ready: {conditions.get('Ready')}, taints: {taints}")
        return node

    def _is_gone(self, path: str) -> bool:
        try:
            found = self.api.get(path)
        except ApiError as error:
            if error.status == 404:
                return True
            raise
        raise ApiError(f"it is still there: {found['metadata']}")

    def _bound_object(self, namespace: str, node: str | None, pod: str | None) -> dict[str, str]:
        if node is not None and pod is not None:
            raise UsageError("a token is bound to a node or to a pod, not to both")
        path = f"/api/v1/nodes/{node}" if node else f"/api/v1/namespaces/{namespace}/pods/{pod}"
        found = self.api.get(path)
        kind = "Node" if node else "Pod"
        return {"apiVersion": "v1", "kind": kind, "name": found["metadata"]["name"], "uid": found["metadata"]["uid"]}


def _number(release: KubernetesRelease) -> tuple[int, ...]:
    return tuple(map(int, release.kubernetes.split(".")))
