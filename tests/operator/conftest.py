"""The shared API server with ROSE's kinds installed."""

from collections.abc import Iterator

import pytest
from lightkube import Client, KubeConfig

from rose_dev.control_plane import ControlPlane
from tests.api.installed import install
from tests.operator.harness import Cluster


@pytest.fixture(scope="session")
def cluster(
    control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    install(control_plane)
    config = KubeConfig.from_file(str(control_plane.kubeconfig)).get()
    client = Client(config=config, trust_env=False)
    yield Cluster(control_plane, client, tmp_path_factory.mktemp("operator"))
    client._client._client.close()
