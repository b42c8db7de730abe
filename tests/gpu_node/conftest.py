"""What the files here share: one node, and one installation on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_dev.testing import NodeSession, with_gpus
from tests.gpu_node.lending import USUAL, Lending, installation

_ORDER = (
    "test_machine",  # needs GPUs that serving has not taken
    "test_owners",
    "test_lending",
    "test_widths",
    "test_modes",  # installs anew
    "test_slow_answers",
    "test_failures",
    "test_recovery",
    "test_real_engines",  # ends the lease of fake engines
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put this folder's files into the order in which they can share an installation."""
    here = Path(__file__).parent
    places = [place for place, item in enumerate(items) if item.path.parent == here]
    ours = sorted((items[place] for place in places), key=lambda item: _ORDER.index(item.path.stem))
    for place, item in zip(places, ours, strict=True):
        items[place] = item


@pytest.fixture(scope="package")
def installed(
    gpu_session: NodeSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lending]:
    """The default installation on the GPU node, and serving beside it."""
    yield from installation(with_gpus(gpu_session), tmp_path_factory.mktemp("models"))


@pytest.fixture
def lending(installed: Lending) -> Lending:
    """The same, with replicas of one and of two GPUs, and an engine beside each."""
    installed.serve(**USUAL)
    installed.ask_as_usual()
    installed.wait_for_all()
    return installed
