"""The parts of the one-node Kubernetes: versions, where they come from, where they are cached.

Every binary is built from the Go module registry (``build``), none is downloaded ready-made. They
are cached by version outside the checkout; ``KUBEBUILDER_ASSETS`` and, for the two tools whose
version does not matter, ``PATH`` are looked at first.
"""

from __future__ import annotations

import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

KUBERNETES = "v1.36.3"
ETCD = "v3.6.8"
KWOK = "v0.8.0"
HELM = "v3.22.0"
COREDNS = "v1.15.0"
CONTAINERD = "v2.2.9"
TOOLKIT = "v1.20.1"
GATEWAY_API = "v1.4.1"
CERT_MANAGER = "v1.18.2"
AGENT_SANDBOX = "v0.5.6"
KUBE_ROUTER = "v2.1.0"
CRANE = "v0.22.1"
COSIGN = "v2.6.5"


@dataclass(frozen=True)
class Part:
    """One binary.

    Attributes:
        package: Go package of its ``main``.
        version: module version; shown, and used by ``go install``.
        in_kubernetes: built inside Kubernetes' own module graph, else by ``go install``.
        on_path: a binary of this name on PATH will do.
        link: linker flags, with ``go install``.
        source: folder of a module of our own, instead of a published one.
    """

    name: str
    package: str
    version: str
    in_kubernetes: bool = True
    on_path: bool = False
    link: str = ""
    source: Path | None = None


def _kubernetes(name: str, *, on_path: bool = False) -> Part:
    return Part(name, f"k8s.io/kubernetes/cmd/{name}", KUBERNETES, on_path=on_path)


CONTROL_PLANE = (
    _kubernetes("kube-apiserver"),
    Part("etcd", "go.etcd.io/etcd/server/v3", ETCD),
    _kubernetes("kubectl", on_path=True),
)
"""What tests of the API need; runs without root."""

HELM_PART = Part("helm", "helm.sh/helm/v3/cmd/helm", HELM, in_kubernetes=False, on_path=True)

NODE = (
    _kubernetes("kubelet"),
    _kubernetes("kube-controller-manager"),
    _kubernetes("kube-scheduler"),
    _kubernetes("kube-proxy"),
    Part("coredns", "github.com/coredns/coredns", COREDNS, in_kubernetes=False),
    HELM_PART,
)
"""What a node and an installation of ROSE need besides."""

SCALE = (Part("kwok", "sigs.k8s.io/kwok/cmd/kwok", KWOK, in_kubernetes=False),)
"""Nodes without machines, for tests of many."""

POLICIES = (
    Part(
        "kube-router",
        "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router",
        KUBE_ROUTER,
        in_kubernetes=False,
        link="-s -w",
    ),
)
"""What enforces network policies, for tests of them: no other part of the node does."""


def _containerd(name: str) -> Part:
    module = "github.com/containerd/containerd/v2"
    link = f"-s -w -X {module}/version.Version={CONTAINERD}"
    return Part(name, f"{module}/cmd/{name}", CONTAINERD, in_kubernetes=False, link=link)


def _toolkit(name: str) -> Part:
    package = f"github.com/NVIDIA/nvidia-container-toolkit/cmd/{name}"
    return Part(name, package, TOOLKIT, in_kubernetes=False)


_GPU_SOURCES = Path(__file__).with_name("gpu_node") / "go"


def _own(name: str, package: str, source: Path) -> Part:
    """Of our own module; its version is what it says, so that a change is built anew."""
    text = b"".join(path.read_bytes() for path in sorted(source.rglob("*")) if path.is_file())
    return Part(name, package, f"{zlib.crc32(text):08x}", in_kubernetes=False, source=source)


GPU_NODE = (
    _containerd("containerd"),
    _containerd("containerd-shim-runc-v2"),
    _containerd("ctr"),
    _toolkit("nvidia-ctk"),
    _toolkit("nvidia-cdi-hook"),
    _toolkit("nvidia-container-runtime"),
    _own("device-plugin", "./device-plugin", _GPU_SOURCES),
    _own("dra-driver", "./dra-driver", _GPU_SOURCES),
    _own("nri-plugin", "./nri-plugin", _GPU_SOURCES),
)
"""What a node with GPUs needs besides: a container runtime with CDI and NRI, NVIDIA's toolkit."""

RELEASE = (
    Part(
        "crane",
        "github.com/google/go-containerregistry/cmd/crane",
        CRANE,
        in_kubernetes=False,
        on_path=True,
    ),
    Part(
        "cosign",
        "github.com/sigstore/cosign/v2/cmd/cosign",
        COSIGN,
        in_kubernetes=False,
        on_path=True,
        link="-s -w",
    ),
)
"""What a release needs besides helm: a client of registries, which is one too, and signatures."""

CERT_MANAGER_PART = _own("cert-manager", ".", Path(__file__).with_name("cert_manager"))
"""Built by the one test that issues with it, of `make test-long`."""

AGENT_SANDBOX_PART = _own(
    "agent-sandbox-controller",
    "sigs.k8s.io/agent-sandbox/cmd/agent-sandbox-controller",
    Path(__file__).with_name("agent_sandbox"),
)
"""Built by the one test of it, of `make test-long`, in a module of ours: not every Go proxy says
which versions there are, which `go install` asks for."""

EVERYTHING = CONTROL_PLANE + NODE + SCALE + POLICIES + GPU_NODE


def cache_root() -> Path:
    """``ROSE_CACHE``, or ``~/.cache/rose``."""
    return Path(os.environ.get("ROSE_CACHE") or Path.home() / ".cache" / "rose")


def bin_directory() -> Path:
    """Where built binaries are kept."""
    return cache_root() / "kube" / KUBERNETES / "bin"


@dataclass(frozen=True)
class Kinds:
    """Definitions of another project's kinds, which its Go module holds as files.

    Attributes:
        name: of the project, and of the folder in the cache.
        folder: of the files in the module.
        pattern: of their names.
    """

    name: str
    module: str
    version: str
    folder: str
    pattern: str

    @property
    def place(self) -> Path:
        """Where they are kept."""
        return cache_root() / self.name / self.version


GATEWAY_KINDS = Kinds(
    "gateway-api",
    "sigs.k8s.io/gateway-api",
    GATEWAY_API,
    "config/crd/standard",
    "gateway.networking.k8s.io_*.yaml",
)
CERT_MANAGER_KINDS = Kinds(
    "cert-manager",
    "github.com/cert-manager/cert-manager",
    CERT_MANAGER,
    "deploy/crds",
    "crd-*.yaml",
)


AGENT_SANDBOX_KINDS = Kinds(
    "agent-sandbox",
    "sigs.k8s.io/agent-sandbox",
    AGENT_SANDBOX,
    "k8s/crds",
    "*agents.x-k8s.io_*.yaml",
)


def place_of(part: Part) -> Path:
    """Where its binary is kept; what is not of Kubernetes' release has its own version's folder."""
    if part.version in {CONTAINERD, TOOLKIT} or part.source is not None:
        return cache_root() / "gpu-node" / f"{CONTAINERD}-{TOOLKIT}" / _versioned(part)
    return bin_directory() / part.name


def _versioned(part: Part) -> str:
    return part.name if part.source is None else f"{part.version}/{part.name}"


def find(part: Part) -> Path | None:
    """The part's binary, or None when it has to be built."""
    candidates = [place_of(part)]
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        candidates.insert(0, Path(assets) / part.name)
    if part.on_path and (on_path := shutil.which(part.name)):
        candidates.append(Path(on_path))
    return next((path for path in candidates if os.access(path, os.X_OK)), None)
