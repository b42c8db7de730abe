"""Installs the generated CustomResourceDefinitions, and a client for them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rose_core.api.crd import KINDS
from rose_dev.api_client import ApiClient
from rose_dev.cluster.control_plane import ControlPlane
from rose_dev.errors import CommandFailed
from rose_dev.waiting import wait_until_established

ROOT = Path(__file__).parents[2]


@contextmanager
def connected(plane: ControlPlane) -> Iterator[ApiClient]:
    """A client of an API server that knows the kinds."""
    install(plane)
    with ApiClient(plane.kubeconfig) as client:
        yield client


def install(plane: ControlPlane) -> None:
    files = [f"--filename={ROOT / 'crds' / kind.plural}.yaml" for kind in KINDS]
    plane.kubectl("apply", *files)
    names = [f"crd/{kind.full_name}" for kind in KINDS]
    wait_until_established(plane.kubectl, *names)
    for kind in KINDS:
        _until_served(plane, kind.full_name)


def _until_served(plane: ControlPlane, kind: str) -> None:
    """The API server says Established before the kind's storage answers (429 until then)."""
    deadline = time.monotonic() + 60
    while True:
        try:
            plane.kubectl("get", kind, "--all-namespaces")
        except CommandFailed:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return
