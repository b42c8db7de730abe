"""A store in every kind of place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_weights.store.open_store import open_store
from rose_weights.store.store import Store
from tests.weights.buckets import make_bucket, s3_server

_numbers = itertools.count()


@pytest.fixture(scope="module")
def s3_environment() -> Iterator[str]:
    """A bucket ``rose`` on a real server, and the environment that says where it is."""
    with s3_server() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ALLOW_HTTP", "true")
        make_bucket(endpoint, "rose")
        yield endpoint


@pytest.fixture
def tmp_path(memory_dir: Path) -> Path:
    """A store is thousands of small files."""
    return memory_dir


@pytest.fixture(params=["folder", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """What ``--root`` says: a new folder, or a new prefix in a bucket."""
    if request.param == "folder":
        return str(tmp_path / "store")
    request.getfixturevalue("s3_environment")
    return f"s3://rose/test-{next(_numbers)}"


@pytest.fixture
def store(root: str) -> Store:
    return open_store(root)
