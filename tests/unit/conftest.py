"""Fixtures of the tests that need no cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.state import ClusterState, ControlPorts, NodePorts
from tests.harness.versions import REFERENCE
from tests.support.node import NodeUnderTest, start_node


@pytest.fixture
def node(tmp_path: Path) -> NodeUnderTest:
    """A DGX H100 with nothing prepared."""
    return start_node(tmp_path)


@pytest.fixture
def silent_log() -> Iterator[None]:
    """Thousands of expected errors in the log take longer than what they are about."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def state(tmp_path: Path) -> ClusterState:
    """A cluster of two nodes, number 3 on its machine."""
    return ClusterState(
        directory=str(tmp_path),
        network=3,
        binaries="/programs",
        release=REFERENCE,
        token="secret",
        control=ControlPorts(etcd=2379, etcd_peer=2380, scheduler=10259, controller_manager=10257),
        nodes=[NodePorts(kubelet=10250, health=10248), NodePorts(kubelet=10250, health=10248)],
        extra_args={},
        owner=None,
    )
