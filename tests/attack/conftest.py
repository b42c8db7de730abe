"""One installation for the suite, which ends with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rose_dev.cluster.gpu_node.starting import state_of
from rose_dev.testing import NodeSession, with_gpus
from rose_dev.waiting import wait_until
from tests.attack.installed import EVIL, SECONDS, Installed
from tests.chart.installation import (
    RESEARCH,
    ROUTERS,
    SERVING,
    SYSTEM,
    make_models,
    namespaces,
    remove,
)


@pytest.fixture(scope="module")
def installed(
    gpu_session: NodeSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    """ROSE with the values that pages tell people to write, a victim, and a tenant who attacks."""
    node = with_gpus(gpu_session)

    def clean() -> None:
        remove(node)
        node.kubectl("delete", "tenantpolicy", "research", EVIL, check=False)
        node.kubectl("delete", "namespace", EVIL, "--ignore-not-found", "--wait=false")
        # Whoever installs next on this node cannot while one of them is on its way out.
        gone = {SYSTEM, ROUTERS, SERVING, RESEARCH, EVIL}
        wait_until(lambda: not gone & set(namespaces(node)), "a clean cluster", seconds=SECONDS)

    clean()
    models = tmp_path_factory.mktemp("models")
    models.parent.chmod(0o755)
    with state_of(node) as state:
        made = Installed(node, state, make_models(models))
        try:
            made.install()
            yield made
        finally:
            clean()
