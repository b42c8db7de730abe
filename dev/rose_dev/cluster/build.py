"""Builds the parts of Kubernetes from Go modules, once per version and user.

Kubernetes' own go.mod names its staging modules at v0.0.0, so a module of ours replaces each by
the published version; the list is read from Kubernetes' go.mod. The version must be set at link
time, or helm and kubectl cannot parse what the API server answers.

A lock file keeps two builds apart, and each binary appears by an atomic rename, so a build that was
killed never leaves half a binary.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeVar

from rose_dev.cluster.parts import (
    AGENT_SANDBOX_KINDS,
    CERT_MANAGER_KINDS,
    EVERYTHING,
    GATEWAY_KINDS,
    KUBERNETES,
    Kinds,
    Part,
    bin_directory,
    cache_root,
    find,
    place_of,
)
from rose_dev.errors import BuildFailed, CommandFailed
from rose_dev.shell import locked, run

_FLAGS = "-mod=mod -buildvcs=false"
_BUILD_SECONDS = 1800.0
_STAGING = re.compile(r"^\s*(k8s\.io/[a-z-]+) v0\.0\.0$", re.MULTILINE)

Log = Callable[[str], None]
Result = TypeVar("Result")


def staging_modules(go_mod: str) -> list[str]:
    """Modules that Kubernetes' go.mod requires at v0.0.0."""
    return sorted(set(_STAGING.findall(go_mod)))


def module_file(go_mod: str, kubernetes: str = KUBERNETES) -> str:
    """The go.mod in which the parts of Kubernetes build, from Kubernetes' own go.mod."""
    staging = kubernetes.replace("v1.", "v0.", 1)
    replaces = "".join(f"\t{name} => {name} {staging}\n" for name in staging_modules(go_mod))
    return (
        "module example.invalid/kube\n\ngo 1.26\n\n"
        f"require k8s.io/kubernetes {kubernetes}\n\nreplace (\n{replaces})\n"
    )


def link_flags(kubernetes: str = KUBERNETES) -> str:
    """Linker flags that give the binaries their version, as upstream's build scripts do."""
    major, minor, _ = kubernetes.lstrip("v").split(".")
    values = {
        "gitVersion": kubernetes,
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
        "gitCommit": "0" * 40,
        "buildDate": "2026-01-01T00:00:00Z",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    sets = [f"-X {package}.{key}={value}" for package in packages for key, value in values.items()]
    return " ".join(["-s", "-w", *sets])


def build(parts: Iterable[Part] = EVERYTHING, log: Log = print) -> dict[str, Path]:
    """Find the parts, and build those that are missing.

    Returns:
        The binary of each part by its name.

    Raises:
        BuildFailed: no Go compiler, or the build failed.
    """
    wanted = tuple(parts)
    if any(find(part) is None for part in wanted):
        with _lock(log):
            _build_missing([part for part in wanted if find(part) is None], log)
    found = {part.name: find(part) for part in wanted}
    return {name: path for name, path in found.items() if path is not None}


def fetch_kinds(log: Log = print) -> None:
    """Definitions of other projects' kinds, from their Go modules; data, nothing is built.

    Raises:
        BuildFailed: no Go, or a module cannot be had.
    """
    for kinds in (GATEWAY_KINDS, CERT_MANAGER_KINDS, AGENT_SANDBOX_KINDS):
        if not kinds.place.is_dir():
            _timed(f"kinds of {kinds.name}", kinds.version, partial(_fetch_kinds, kinds), log)


def downloaded(module: str, version: str, cwd: Path, seconds: float = _BUILD_SECONDS) -> Path:
    """The folder of a published Go module's sources, in Go's own cache; read-only.

    Raises:
        CommandFailed: it cannot be had.
    """
    answer = run(
        ["go", "mod", "download", "-json", f"{module}@{version}"],
        seconds=seconds,
        env={**_environment(), "GOFLAGS": ""},
        cwd=cwd,
    )
    return Path(json.loads(answer.stdout)["Dir"])


def _fetch_kinds(kinds: Kinds) -> None:
    folder = kinds.place
    folder.parent.mkdir(parents=True, exist_ok=True)
    there = downloaded(kinds.module, kinds.version, folder.parent) / kinds.folder
    making = folder.with_name(f".making-{kinds.version}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    for path in there.glob(kinds.pattern):
        shutil.copyfile(path, making / path.name)
    making.replace(folder)


def _lock(log: Log) -> AbstractContextManager[None]:
    busy = "[cluster] another build is running; waiting for it"
    return locked(cache_root() / "kube" / "lock", lambda: log(busy))


def _build_missing(missing: list[Part], log: Log) -> None:
    if not missing:
        return
    if shutil.which("go") is None:
        names = ", ".join(part.name for part in missing)
        message = (
            f"no Go compiler on PATH, needed to build {names}; install Go >= 1.26, "
            "or point KUBEBUILDER_ASSETS at ready-made binaries"
        )
        raise BuildFailed(message)
    log(f"[cluster] building {len(missing)} parts into {bin_directory()} (once; minutes)")
    workspace = None
    if any(part.in_kubernetes for part in missing):
        workspace = _timed("Kubernetes modules", KUBERNETES, _kubernetes_workspace, log)
    for part in missing:
        _timed(part.name, part.version, partial(_build_one, part, workspace), log)


def _timed(name: str, version: str, action: Callable[[], Result], log: Log) -> Result:
    start = time.monotonic()
    try:
        result = action()
    except CommandFailed as error:
        message = f"{name} {version} could not be built: {error}"
        raise BuildFailed(message) from error
    log(f"[cluster]   {name} {version}: {time.monotonic() - start:.0f} s")
    return result


def _environment(**extra: str) -> Mapping[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "GOBIN"}
    return {**kept, "GOFLAGS": _FLAGS, **extra}


def _kubernetes_workspace() -> Path:
    """A module whose graph holds Kubernetes and the etcd it wants."""
    workspace = bin_directory().parent / "module"
    workspace.mkdir(parents=True, exist_ok=True)
    (workspace / "go.sum").unlink(missing_ok=True)
    upstream = downloaded("k8s.io/kubernetes", KUBERNETES, cache_root()) / "go.mod"
    (workspace / "go.mod").write_text(module_file(upstream.read_text()))
    (workspace / "tools.go").write_text("//go:build tools\n\npackage tools\n")
    # With no version given, Go would take the newest there is.
    tools = [f"{part.package}@{part.version}" for part in EVERYTHING if part.in_kubernetes]
    command = ["go", "get", "-tool", *tools]
    run(command, seconds=_BUILD_SECONDS, env=_environment(), cwd=workspace)
    return workspace


def _build_one(part: Part, workspace: Path | None) -> None:
    target = place_of(part)
    scratch = target.parent / f".making-{part.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    if part.in_kubernetes:
        command = ["go", "build", "-ldflags", link_flags(), "-o", f"{scratch}/", part.package]
        run(command, seconds=_BUILD_SECONDS, env=_environment(), cwd=workspace)
    elif part.source is not None:
        module = scratch.with_name(f".module-{part.name}")
        shutil.rmtree(module, ignore_errors=True)
        shutil.copytree(part.source, module)
        (module / "go.mod.txt").rename(module / "go.mod")
        command = ["go", "build", "-o", f"{scratch}/", part.package]
        run(command, seconds=_BUILD_SECONDS, env=_environment(), cwd=module)
        shutil.rmtree(module)
    else:
        command = ["go", "install", "-ldflags", part.link, f"{part.package}@{part.version}"]
        environment = _environment(GOBIN=str(scratch))
        run(command, seconds=_BUILD_SECONDS, env=environment, cwd=cache_root())
    # Go names a binary after its folder; etcd's is called server.
    (made,) = scratch.iterdir()
    made.replace(target)
    scratch.rmdir()
