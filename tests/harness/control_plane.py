"""etcd, kube-apiserver, kube-scheduler and kube-controller-manager of one cluster."""

from __future__ import annotations

from pathlib import Path

from tests.harness.audit import flags_of_the_suite
from tests.harness.certs import Authority, Pair, service_account_keys
from tests.harness.kubeconfig import certificate_user, token_user, write_kubeconfig
from tests.harness.processes import ProcessRecord, ProcessTable, stop
from tests.harness.readiness import http_ok, wait_ready
from tests.harness.state import ClusterState

READY_S = 180.0
"""Generous: on two busy cores the API server has been seen to take 15 s; on an idle machine it takes 3.
One that ends is noticed at once."""
ADMIN = "admin"
UNUSED_ADDRESS = "192.0.2.1"
"""Reserved for documentation (RFC 5737). Without one the API server looks for a default route, which may be absent."""
NODE_LOST_AFTER = "24h"
"""When the node lifecycle controller gives a silent node up. So long, because node objects without a kubelet stay
silent for ever; a test of node loss adds ``--node-monitor-grace-period`` for kube-controller-manager in extra_args."""


class ControlPlane:
    """Starts the control plane of the cluster that ``state`` describes."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._layout = state.layout
        self._table = ProcessTable(state.layout.root)

    def start_etcd(self) -> None:
        """Start etcd without waiting for it."""
        (self._layout.root / "etcd").mkdir(mode=0o700)
        self._spawn("etcd", etcd_flags(self._state))

    def start_apiserver(self) -> None:
        """Wait for etcd and start the API server without waiting for it; needs the certificates."""
        address, port = self._state.addresses.control_plane, self._state.control.etcd
        self._wait("etcd", f"http://{address}:{port}/health")
        self._spawn("kube-apiserver", [*apiserver_flags(self._state), *flags_of_the_suite(self._layout.root)])

    def start_controllers(self) -> None:
        """Wait for the API server and start scheduler and controller manager without waiting for them."""
        self._wait("kube-apiserver", f"{self._state.server}/readyz")
        self._spawn("kube-scheduler", scheduler_flags(self._state))
        self._spawn("kube-controller-manager", controller_manager_flags(self._state))

    def wait(self) -> None:
        """Wait until scheduler and controller manager are ready."""
        address, ports = self._state.addresses.control_plane, self._state.control
        self._wait("kube-scheduler", f"https://{address}:{ports.scheduler}/healthz")
        self._wait("kube-controller-manager", f"https://{address}:{ports.controller_manager}/healthz")

    def stop(self) -> None:
        """End everything but etcd."""
        names = ("kube-controller-manager", "kube-scheduler", "kube-apiserver")
        stop([record for record in map(self._table.get, names) if record is not None])

    def stop_scheduler(self) -> None:
        """End the scheduler; ``restart_scheduler`` starts another."""
        record = self._table.get("kube-scheduler")
        stop([record] if record else [])

    def restart_scheduler(self) -> ProcessRecord:
        """Start the scheduler anew, with nothing in its memory, and wait until it has its caches."""
        self.stop_scheduler()
        self._spawn("kube-scheduler", scheduler_flags(self._state))
        address, port = self._state.addresses.control_plane, self._state.control.scheduler
        self._wait("kube-scheduler", f"https://{address}:{port}/readyz")
        record = self._table.get("kube-scheduler")
        assert record is not None
        return record

    def _spawn(self, name: str, flags: list[str]) -> None:
        command = [self._state.program(name), *flags, *self._state.extra_args.get(name, [])]
        self._table.spawn(name, command, self._layout.logs / f"{name}.log")

    def _wait(self, name: str, url: str) -> None:
        record = self._table.get(name)
        assert record is not None, f"{name} was not started"
        authority = self._layout.pki / "ca.crt" if url.startswith("https") else None
        wait_ready(record, http_ok(url, authority), self._layout.logs / f"{name}.log", READY_S)


def make_credentials(state: ClusterState) -> Authority:
    """Certificates, keys, tokens and kubeconfigs of the control plane and of the admin."""
    layout, addresses = state.layout, state.addresses
    authority = Authority(layout.pki)
    service_account_keys(layout.pki)
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
    authority.issue("kube-apiserver", "kube-apiserver", addresses=[addresses.api], dns=names)
    authority.issue("kubelet-client", "kube-apiserver-kubelet-client", ["system:masters"])
    for name in ("kube-scheduler", "kube-controller-manager"):
        pair = authority.issue(name, f"system:{name}", addresses=[addresses.control_plane])
        _kubeconfig(state, name, certificate_user(pair))
    tokens = layout.pki / "tokens.csv"
    tokens.touch(mode=0o600)
    tokens.write_text(f'{state.token},{ADMIN},{ADMIN},"system:masters"\n')
    _kubeconfig(state, ADMIN, token_user(state.token))
    return authority


def make_kubelet_credentials(state: ClusterState, authority: Authority, name: str, address: str) -> Pair:
    """Certificate and kubeconfig of the kubelet of node ``name``: the node authorizer knows it by them."""
    pair = authority.issue(name, f"system:node:{name}", ["system:nodes"], addresses=[address], dns=[name])
    _kubeconfig(state, name, certificate_user(pair))
    return pair


def _kubeconfig(state: ClusterState, name: str, user: dict[str, str]) -> Path:
    return write_kubeconfig(state.layout.kubeconfig(name), state.server, state.layout.pki / "ca.crt", user)


def etcd_flags(state: ClusterState) -> list[str]:
    """Plain http, because it listens on loopback; no fsync, because its data need not survive a crash."""
    address = state.addresses.control_plane
    client, peer = f"http://{address}:{state.control.etcd}", f"http://{address}:{state.control.etcd_peer}"
    return [
        "--name=etcd",
        f"--data-dir={state.layout.root / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=etcd={peer}",
        "--unsafe-no-fsync",
        # Alone, it need not wait a second for the votes of others.
        "--heartbeat-interval=50",
        "--election-timeout=250",
        "--log-level=warn",
    ]


def apiserver_flags(state: ClusterState) -> list[str]:
    """A loopback address can't be advertised, so another is named, which the endpoint reconciler "none" never uses."""
    pki, addresses = state.layout.pki, state.addresses
    return [
        f"--etcd-servers=http://{addresses.control_plane}:{state.control.etcd}",
        f"--bind-address={addresses.api}",
        "--secure-port=443",
        "--endpoint-reconciler-type=none",
        f"--advertise-address={UNUSED_ADDRESS}",
        f"--service-cluster-ip-range={addresses.service_range}",
        f"--tls-cert-file={pki / 'kube-apiserver.crt'}",
        f"--tls-private-key-file={pki / 'kube-apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--token-auth-file={pki / 'tokens.csv'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-account-key-file={pki / 'service-accounts.pub'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'kubelet-client.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--allow-privileged=true",
        "--profiling=false",
    ]


def scheduler_flags(state: ClusterState) -> list[str]:
    """The stock scheduler, alone: it need not be elected."""
    return [*_controller_flags(state, "kube-scheduler", state.control.scheduler), "--profiling=false"]


def controller_manager_flags(state: ClusterState) -> list[str]:
    """All controllers, each with its own service account as in a real cluster."""
    pki = state.layout.pki
    return [
        *_controller_flags(state, "kube-controller-manager", state.control.controller_manager),
        "--use-service-account-credentials",
        # With the default of 20 a second, making forty controllers' tokens takes 5 s of every start.
        "--kube-api-qps=300",
        "--kube-api-burst=600",
        f"--service-account-private-key-file={pki / 'service-accounts.key'}",
        f"--root-ca-file={pki / 'ca.crt'}",
        f"--cluster-signing-cert-file={pki / 'ca.crt'}",
        f"--cluster-signing-key-file={pki / 'ca.key'}",
        f"--node-monitor-grace-period={NODE_LOST_AFTER}",
        # How soon a node that became Ready loses the taint that keeps pods away.
        "--node-monitor-period=1s",
        "--profiling=false",
    ]


def _controller_flags(state: ClusterState, name: str, port: int) -> list[str]:
    kubeconfig, pki = state.layout.kubeconfig(name), state.layout.pki
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        f"--bind-address={state.addresses.control_plane}",
        f"--secure-port={port}",
        f"--tls-cert-file={pki / f'{name}.crt'}",
        f"--tls-private-key-file={pki / f'{name}.key'}",
        "--leader-elect=false",
    ]
