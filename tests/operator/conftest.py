"""The shared API server with ROSE's kinds installed."""

import pytest

from rose_dev.api_client import ApiClient
from rose_dev.cluster.control_plane import ControlPlane
from tests.operator.harness import Cluster


@pytest.fixture(scope="session")
def cluster(
    control_plane: ControlPlane, api_client: ApiClient, tmp_path_factory: pytest.TempPathFactory
) -> Cluster:
    return Cluster(control_plane, api_client, tmp_path_factory.mktemp("operator"))
