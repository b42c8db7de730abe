"""Pytest fixtures that bring up Kubernetes once per test session.

``control_plane`` is the API server alone (no root). Whoever uses it shares it with the whole
session, so tests make namespaces or names of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rose_dev.control_plane import ControlPlane


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A real API server without controllers or nodes."""
    with ControlPlane() as plane:
        yield plane
