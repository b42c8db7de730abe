"""The shared API server, under the name that the tests of its rules use."""

import pytest

from rose_dev.api_client import ApiClient


@pytest.fixture(scope="session")
def client(api_client: ApiClient) -> ApiClient:
    return api_client
