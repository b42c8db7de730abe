"""Installs the generated CustomResourceDefinitions once per session."""

from pathlib import Path

from rose_core.api.crd import KINDS
from rose_dev.control_plane import ControlPlane

ROOT = Path(__file__).parents[2]


def install(plane: ControlPlane) -> None:
    files = [f"--filename={ROOT / 'crds' / kind.plural}.yaml" for kind in KINDS]
    plane.kubectl("apply", *files)
    names = [f"crd/{kind.full_name}" for kind in KINDS]
    plane.kubectl("wait", "--for=condition=Established", *names)
