"""The shared API server, under the name that the tests of its rules use."""

import pytest
from lightkube import Client


@pytest.fixture(scope="session")
def client(api_client: Client) -> Client:
    return api_client
