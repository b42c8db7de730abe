"""KEDA itself on the development node: built from its Go module, as the other parts are.

Its module brings every scaler there is and with them the clients of three clouds: some 2 GB of
modules; on two busy cores it took an hour. So it is a part of its own, which only
``make test-keda`` builds (``python -m rose_dev.keda``). Operator and metrics adapter run; the
admission webhooks, which only say early what is wrong with an object, are left out.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rose_dev.cluster.build import build, downloaded
from rose_dev.cluster.node import Node
from rose_dev.cluster.parts import CONTROL_PLANE, cache_root
from rose_dev.errors import BuildFailed, CommandFailed, DevelopmentError
from rose_dev.image import write_archive
from rose_dev.shell import run

KEDA = "v2.21.0"
MODULE = "github.com/kedacore/keda/v2"
IMAGE = "localhost/keda:dev"
NAMESPACE = "keda"
_PROGRAMS = {"keda": "operator", "keda-adapter": "adapter"}
_BUILD_SECONDS = 7200.0
_WEBHOOKS = "keda-admission"

Log = Callable[[str], None]


def folder() -> Path:
    """Where its programs and manifests are kept."""
    return cache_root() / "keda" / KEDA


def built() -> bool:
    """Whether it is there."""
    return all(os.access(folder() / name, os.X_OK) for name in (*_PROGRAMS, "config"))


def provide(log: Log = print) -> Path:
    """Build it once per version.

    Raises:
        BuildFailed: there is no Go, or the build failed.
    """
    if built():
        return folder()
    if shutil.which("go") is None:
        message = "no Go compiler on PATH, needed to build KEDA; install Go >= 1.26"
        raise BuildFailed(message)
    log(f"[keda] building {KEDA} into {folder()} (once; 2 GB of modules, many minutes)")
    making = folder().with_name(f".making-{KEDA}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    environment = {key: value for key, value in os.environ.items() if key != "GOBIN"}
    try:
        # A copy: Go does not build a module whose go.mod replaces others, but as the main one.
        source = making / "source"
        shutil.copytree(downloaded(MODULE, KEDA, making, _BUILD_SECONDS), source)
        for path in (source, *source.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)
        flags = {"GOFLAGS": "-mod=mod -buildvcs=false", "CGO_ENABLED": "0"}
        version = f"-s -w -X={MODULE}/version.Version={KEDA.removeprefix('v')}"
        for name, package in _PROGRAMS.items():
            run(
                ["go", "build", "-ldflags", version, "-o", str(making / name), f"./cmd/{package}"],
                seconds=_BUILD_SECONDS,
                env={**environment, **flags},
                cwd=source,
            )
        shutil.copytree(source / "config", making / "config")
    except CommandFailed as error:
        message = f"KEDA {KEDA} could not be built: {error}"
        raise BuildFailed(message) from error
    shutil.rmtree(making / "source")
    shutil.rmtree(folder(), ignore_errors=True)
    making.replace(folder())
    return folder()


def archive() -> Path:
    """Its image: the two programs and nothing else."""
    image, layer = folder() / "image.tar", folder() / "layer.tar"
    if not image.exists():
        with tarfile.open(layer, "w") as out:
            for name in _PROGRAMS:
                out.add(folder() / name, arcname=name)
        write_archive(image, IMAGE, [layer], {"Env": ["PATH=/"]})
        layer.unlink()
    return image


def manifests() -> list[dict[str, Any]]:
    """What KEDA's own kustomization says, with our image and without the webhooks.

    Raises:
        CommandFailed: kubectl cannot read it.
    """
    kubectl = build(CONTROL_PLANE)["kubectl"]
    made = run([str(kubectl), "kustomize", str(folder() / "config" / "default")], seconds=60)
    objects = []
    for item in yaml.safe_load_all(made.stdout):
        if "Webhook" in item["kind"] or item["metadata"]["name"].startswith(_WEBHOOKS):
            continue
        if item["kind"] == "Deployment":
            for container in item["spec"]["template"]["spec"]["containers"]:
                container |= {"image": IMAGE, "imagePullPolicy": "Never"}
                container["securityContext"] |= {"runAsUser": 65532}
        objects.append(item)
    return objects


def install(node: Node) -> None:
    """KEDA on a node that runs, ready to scale.

    Raises:
        CommandFailed: it did not come up.
    """
    node.load(archive())
    text = yaml.safe_dump_all(manifests(), sort_keys=False)
    # Server-side: its kinds are too large for an annotation.
    node.kubectl("apply", "--server-side", "--force-conflicts", "--filename=-", stdin=text)
    for name in ("keda-operator", "keda-metrics-apiserver"):
        where = (f"deployment/{name}", f"--namespace={NAMESPACE}", "--timeout=240s")
        node.kubectl("rollout", "status", *where, seconds=250)
    available = ("apiservice/v1beta1.external.metrics.k8s.io", "--for=condition=Available")
    node.kubectl("wait", *available, "--timeout=120s", seconds=130)


def main() -> int:
    """Build it; 1 when it could not be."""
    try:
        provide()
    except DevelopmentError as error:
        print(f"keda: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
