"""What a plugin makes sure of before it asks another, which works, to hand over its node: that it could do the work."""

from __future__ import annotations

from contextlib import ExitStack

from driver.config.settings import NodeSettings
from driver.kube.nodes import owner_reference
from driver.kube.transport import KubeClient, load_configuration
from kubelet_plugin.checkpoint import check_readable
from kubelet_plugin.scan import Scanner
from tessera.hosts import open_host
from tessera.node import USER_AGENT
from tessera.node_parts import choice_of


def check(settings: NodeSettings, awake: ExitStack) -> None:
    """Only reads. Raises RecoverableError for what may pass, FatalError for what will not.

    The driver's library stays open in ``awake`` until the next check: GPUs that nobody uses take seconds to wake.
    """
    check_readable(settings.state_dir)
    owner_reference(KubeClient(load_configuration(settings.kubeconfig), USER_AGENT), settings.node_name)
    with ExitStack() as stack:
        host, _ = stack.enter_context(open_host(settings, lasting=True))
        Scanner(host, choice_of(settings)).discover()
        awake.close()
        awake.push(stack.pop_all())
