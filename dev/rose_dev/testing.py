"""Pytest fixtures that bring up Kubernetes once per test process.

``control_plane`` is the API server alone (no root). ``node`` is the whole one-node Kubernetes, in
place of which an existing cluster is never taken: tests break things. Both are shared by every test
of the process, so tests make namespaces of their own. A machine has room for two clusters
(``place``), and a process takes the first that no other one holds. A node that a killed session
left behind is replaced; a node that a person brought up is used and left running. ``second_node``
is another beside it. ``gpu_node`` is the node with GPUs, for which a node without is replaced, and
the other way round.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rose_dev.cluster import cgroups
from rose_dev.cluster.control_plane import ControlPlane
from rose_dev.cluster.gpu_node.starting import profile_of
from rose_dev.cluster.node import Node, require_root
from rose_dev.cluster.place import CLUSTERS, NodeFolders, place
from rose_dev.cluster.second_node import SecondNode
from rose_dev.errors import DevelopmentError, NotSupported

_TURN_SECONDS = 240.0
_CLAIMED = 8
_NEVER = "never"
MACHINE = "h100x8"
"""The node of ``gpu_node``."""


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A real API server without controllers or nodes."""
    with ControlPlane() as plane:
        yield plane


class NodeSession:
    """The node of this test process.

    Args:
        at: where it runs; this process alone holds it.

    Attributes:
        node: for the tests.
        ours: the session has brought it up, and takes it down.
    """

    def __init__(self, at: NodeFolders) -> None:
        self.node = Node(at)
        self._owner = self.node.place.run / "owner"
        left_behind = self._owner.exists()
        self.ours = left_behind or not self.node.namespaces.alive()
        self._up: int | str | None = _NEVER
        if left_behind:
            self.node.down()

    def ensure(self, gpus: int | str | None = None) -> Node:
        """The node, up: a test before may have ended it, or wanted other GPUs.

        Its image is made of the checkout once: that takes longer than many a test on the node.
        """
        wanted = _CLAIMED if gpus is None and self.ours else gpus
        if self._up != wanted or not self.node.healthy():
            self.node.up(gpus=wanted)
            self._up = wanted
        if self.ours:
            cgroups.prefer(self.node.place.seat.cgroup)
            self._owner.write_text(f"tests, process {os.getpid()}\n")
        return self.node

    def close(self) -> None:
        """Take the node down if it is ours."""
        if self.ours:
            self.node.down()


@pytest.fixture(scope="session")
def node_session() -> Iterator[NodeSession]:
    """Holds one of the machine's clusters for this process; a third process waits for its turn."""
    try:
        require_root()
    except NotSupported as error:
        pytest.skip(str(error))
    with _free_place() as at:
        session = NodeSession(at)
        try:
            yield session
        finally:
            session.close()


@pytest.fixture(scope="session")
def ending_session(node_session: NodeSession) -> NodeSession:
    """``node_session`` for what ends the node; such files run before the others (``lanes``)."""
    return node_session


@pytest.fixture
def node(node_session: NodeSession) -> Node:
    """The one-node Kubernetes, up and ready, with ROSE's image ``localhost/rose:dev``."""
    return node_session.ensure()


@pytest.fixture(scope="session")
def second_session(node_session: NodeSession) -> Iterator[SecondNode]:
    """For a node beside it, which lasts: such files run one after the other (``lanes``)."""
    second = node_session.node.second()
    yield second
    if second.namespaces.alive():
        second.down()


@pytest.fixture
def second_node(node_session: NodeSession, second_session: SecondNode) -> SecondNode:
    """A second node beside ``node``, up and ready."""
    node_session.ensure()
    second_session.up()
    return second_session


@pytest.fixture(scope="session")
def gpu_session(node_session: NodeSession) -> NodeSession:
    """``node_session`` for what needs GPUs on the node; such files run last (``lanes``)."""
    return node_session


@pytest.fixture
def gpu_node(gpu_session: NodeSession) -> Node:
    """The same with eight GPUs behind NVIDIA's own programs (``rose_dev.cluster.gpu_node``)."""
    return with_gpus(gpu_session)


def with_gpus(gpu_session: NodeSession) -> Node:
    """The session's node as the machine of the tests with GPUs."""
    if not gpu_session.ours and profile_of(gpu_session.node) != MACHINE:
        pytest.skip(f"a node of yours is up with other GPUs than {MACHINE}")
    return gpu_session.ensure(MACHINE)


@contextmanager
def _free_place() -> Iterator[NodeFolders]:
    """The first cluster's place that no other process holds, held until the end."""
    deadline = time.monotonic() + _TURN_SECONDS
    while True:
        for at in map(place, range(len(CLUSTERS))):
            lock = at.run.with_suffix(".tests.lock")
            lock.parent.mkdir(parents=True, exist_ok=True)
            with lock.open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield at
                return
        if time.monotonic() > deadline:
            message = f"other test sessions have held every node for long (lock {lock})"
            raise DevelopmentError(message)
        time.sleep(0.5)
