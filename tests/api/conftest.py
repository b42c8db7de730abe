"""A client for the shared API server, with ROSE's kinds installed."""

from collections.abc import Iterator

import pytest
from lightkube import Client, KubeConfig

from rose_dev.control_plane import ControlPlane
from tests.api.installed import install


@pytest.fixture(scope="session")
def client(control_plane: ControlPlane) -> Iterator[Client]:
    install(control_plane)
    config = KubeConfig.from_file(str(control_plane.kubeconfig)).get()
    client = Client(config=config, trust_env=False)
    yield client
    client._client._client.close()
