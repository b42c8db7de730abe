"""Installs the generated CustomResourceDefinitions once per session."""

import time
from pathlib import Path

from rose_core.api.crd import KINDS
from rose_dev.control_plane import ControlPlane
from rose_dev.errors import CommandFailed

ROOT = Path(__file__).parents[2]


def install(plane: ControlPlane) -> None:
    files = [f"--filename={ROOT / 'crds' / kind.plural}.yaml" for kind in KINDS]
    plane.kubectl("apply", *files)
    names = [f"crd/{kind.full_name}" for kind in KINDS]
    plane.kubectl("wait", "--for=condition=Established", *names)
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
