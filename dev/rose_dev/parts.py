"""The parts of the one-node Kubernetes: versions, where they come from, where they are cached.

Every binary is built from the Go module registry (``build``), none is downloaded ready-made. They
are cached by version outside the checkout; ``KUBEBUILDER_ASSETS`` and, for the two tools whose
version does not matter, ``PATH`` are looked at first.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

KUBERNETES = "v1.36.3"
ETCD = "v3.6.8"
KWOK = "v0.8.0"
HELM = "v3.22.0"
COREDNS = "v1.15.0"


@dataclass(frozen=True)
class Part:
    """One binary.

    Attributes:
        package: Go package of its ``main``.
        version: module version; shown, and used by ``go install``.
        in_kubernetes: built inside Kubernetes' own module graph, else by ``go install``.
        on_path: a binary of this name on PATH will do.
    """

    name: str
    package: str
    version: str
    in_kubernetes: bool = True
    on_path: bool = False


def _kubernetes(name: str, *, on_path: bool = False) -> Part:
    return Part(name, f"k8s.io/kubernetes/cmd/{name}", KUBERNETES, on_path=on_path)


CONTROL_PLANE = (
    _kubernetes("kube-apiserver"),
    Part("etcd", "go.etcd.io/etcd/server/v3", ETCD),
    _kubernetes("kubectl", on_path=True),
)
"""What tests of the API need; runs without root."""

NODE = (
    _kubernetes("kubelet"),
    _kubernetes("kube-controller-manager"),
    _kubernetes("kube-scheduler"),
    _kubernetes("kube-proxy"),
    Part("coredns", "github.com/coredns/coredns", COREDNS, in_kubernetes=False),
    Part("helm", "helm.sh/helm/v3/cmd/helm", HELM, in_kubernetes=False, on_path=True),
)
"""What a node and an installation of ROSE need besides."""

SCALE = (Part("kwok", "sigs.k8s.io/kwok/cmd/kwok", KWOK, in_kubernetes=False),)
"""Nodes without machines, for tests of many."""

EVERYTHING = CONTROL_PLANE + NODE + SCALE


def cache_root() -> Path:
    """``ROSE_CACHE``, or ``~/.cache/rose``."""
    return Path(os.environ.get("ROSE_CACHE") or Path.home() / ".cache" / "rose")


def bin_directory() -> Path:
    """Where built binaries are kept."""
    return cache_root() / "kube" / KUBERNETES / "bin"


def find(part: Part) -> Path | None:
    """The part's binary, or None when it has to be built."""
    candidates = [bin_directory() / part.name]
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        candidates.insert(0, Path(assets) / part.name)
    if part.on_path and (on_path := shutil.which(part.name)):
        candidates.append(Path(on_path))
    return next((path for path in candidates if os.access(path, os.X_OK)), None)
