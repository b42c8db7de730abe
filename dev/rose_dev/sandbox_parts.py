"""What sandboxes need on a machine of Debian: ``python -m rose_dev.sandbox_parts``, as root.

Into ``$ROSE_CACHE/sandbox``, once:

| what | from | why there |
|---|---|---|
| runc, libbpf | the machine's own suite | they run in the machine's own libraries |
| CRIU, btrfs-progs, clang | the suite ``NEWER`` | sockets on Linux 6.16 and later need CRIU 4.2 |
| runsc (gVisor) | the suite ``GVISOR`` | the newest that starts a process without KVM |
| the image ``base`` | the suite ``IMAGE``, by mmdebstrap | what agents work in |
| ``bpf/effects.o`` | compiled here | the inspector's program |

Nothing of the machine is changed: packages are unpacked into the cache, and programs of the newer
suite run by that suite's own loader. Where a part cannot be had it is skipped by name.
Next step: ``rose_sandbox.runtimes.parts`` finds them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import rose_sandbox.inspector
from rose_dev.environments import cache_folder, log

NEWER = "forky"
GVISOR = "trixie"
IMAGE = "trixie"
IMAGE_PACKAGES = (
    *("procps", "psmisc", "python3", "python3-venv", "python3-pip", "git", "sqlite3", "tmux"),
    *("make", "gcc", "libc6-dev", "curl", "socat", "less", "file", "patch", "rsync", "zip"),
    *("unzip", "redis-server", "netcat-openbsd", "screen", "iproute2", "lsof", "busybox"),
)
_SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
_LIST = Path("/etc/apt/sources.list")
_SECONDS = 1200.0
_LIBRARIES = "usr/lib/x86_64-linux-gnu"


class Impossible(Exception):
    """A part cannot be had on this machine; the text says why."""


class Packages:
    """Packages of one suite, by an apt of its own that changes nothing of the machine's.

    Args:
        folder: of lists, packages and what they hold.
        suite: another than the machine's own; None: the machine's own.
    """

    def __init__(self, folder: Path, suite: str | None) -> None:
        self.root = folder / "root"
        self.sources = folder / "debian.sources"
        self._folder = folder
        self._suite = suite

    def refresh(self) -> None:
        """Read the suite's lists.

        Raises:
            Impossible: the machine has no Debian source, or the suite cannot be read.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        for name in ("lists/partial", "packages/partial", "root"):
            (self._folder / name).mkdir(parents=True)
        self.sources.write_text(own_source(self._suite))
        status = self._folder / "status"
        if self._suite is None:
            shutil.copy("/var/lib/dpkg/status", status)
        else:
            status.touch()  # nothing is installed: every library comes along
        (self._folder / "apt.conf").write_text(
            f'Dir::State::lists "{self._folder}/lists";\n'
            f'Dir::State::status "{status}";\n'
            f'Dir::Cache "{self._folder}";\n'
            f'Dir::Cache::archives "{self._folder}/packages";\n'
            'Dir::Etc::sourcelist "/dev/null";\n'
            f'Dir::Etc::sourceparts "{self._folder}/sources";\n'
            'APT::Sandbox::User "root";\n'
        )
        (self._folder / "sources").mkdir()
        shutil.copy(self.sources, self._folder / "sources")
        self._apt("update", "-q")

    def unpack(self, *names: str, alone: bool = False) -> None:
        """Packages, with everything that they need unless ``alone``, below ``root``."""
        packages = self._folder / "packages"
        if alone:
            self._apt("download", *names, folder=packages)
        else:
            self._apt(*("install", "--yes", "--download-only", "--no-install-recommends"), *names)
        for file in sorted(packages.glob("*.deb")):
            run(["dpkg-deb", "--extract", str(file), str(self.root)])
            file.unlink()

    def _apt(self, *arguments: str, folder: Path | None = None) -> None:
        run(
            ["apt-get", *arguments],
            {"APT_CONFIG": str(self._folder / "apt.conf"), "DEBIAN_FRONTEND": "noninteractive"},
            folder,
        )

    def put(self, program: str, folder: Path) -> None:
        """A command in a folder that runs a program of ``root`` by the suite's own loader."""
        libraries = self.root / _LIBRARIES
        command = folder / Path(program).name
        command.write_text(
            f'#!/bin/sh\nexec "{libraries}/ld-linux-x86-64.so.2" --library-path '
            f'"{libraries}:{libraries}/llvm" "{self.root / program}" "$@"\n'
        )
        command.chmod(0o755)


def own_source(suite: str | None) -> str:
    """The machine's first Debian source, of another suite.

    Raises:
        Impossible: it has none.
    """
    if _SOURCES.exists():
        first = _SOURCES.read_text().split("\n\n", maxsplit=1)[0]
        return first if suite is None else re.sub(r"(?m)^Suites:.*$", f"Suites: {suite}", first)
    for line in _LIST.read_text().splitlines() if _LIST.exists() else []:
        found = re.fullmatch(r"deb (?:\[[^]]*\] )?(\S+/debian/?) (\S+) .*", line.strip())
        if found:
            return (
                f"Types: deb\nURIs: {found[1]}\nSuites: {suite or found[2]}\nComponents: main\n"
                "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
            )
    raise Impossible("this machine has no source of Debian packages")


def run(
    command: Sequence[str], more: dict[str, str] | None = None, folder: Path | None = None
) -> None:
    """Run a step.

    Raises:
        Impossible: it failed; its last words are in the text.
    """
    try:
        result = subprocess.run(
            command,
            env=os.environ | (more or {}),
            cwd=folder,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Impossible(f"{command[0]}: {error}") from error
    if result.returncode:
        output = result.stdout.decode(errors="replace").strip()[-1500:]
        raise Impossible(f"exit code {result.returncode} from {' '.join(command)}:\n{output}")


def install(cache: Path) -> Path:
    """Every part that is not there yet; returns their folder.

    Raises:
        Impossible: a part cannot be had; those before it are there.
    """
    if os.geteuid() != 0:
        raise Impossible("root is needed: sandboxes are made of namespaces, mounts and groups")
    folder = cache / "sandbox"
    for name in ("bin", "images", "bpf"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    own, newer = Packages(folder / "own", None), Packages(folder / "newer", NEWER)
    _once(folder, "runc", "runc and libbpf", "1", lambda: _own(own, folder))
    _once(folder, "criu", f"CRIU, btrfs-progs, clang ({NEWER})", NEWER, lambda: _new(newer, folder))
    try:
        _once(folder, "runsc", f"gVisor ({GVISOR})", GVISOR, lambda: _gvisor(folder))
    except Impossible as error:  # runc's sandboxes need none of it
        log(f"sandbox: gVisor is skipped: {error}")
    wanted = f"{IMAGE} {' '.join(IMAGE_PACKAGES)}"
    _once(folder, "image", "the image base (about 650 MB)", wanted, lambda: _image(folder))
    source = Path(rose_sandbox.inspector.__file__).with_name("effects.bpf.c")
    if source.exists():
        text = source.read_text()
        _once(folder, "bpf", "the inspector's program", text, lambda: _effects(source, folder))
    return folder


def _once(folder: Path, name: str, title: str, made_of: str, make: Callable[[], None]) -> None:
    stamp = folder / f".{name}"
    wanted = hashlib.sha256(made_of.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    log(f"sandbox: {title}")
    started = time.monotonic()
    make()
    stamp.write_text(wanted)
    log(f"sandbox: {title}: done in {time.monotonic() - started:.0f} s")


def _own(packages: Packages, folder: Path) -> None:
    packages.refresh()
    packages.unpack("runc", "libseccomp2", "libbpf1", "mmdebstrap", alone=True)
    shutil.copy(packages.root / "usr/sbin/runc", folder / "bin" / "runc")
    put_libbpf(packages, folder)


def put_libbpf(packages: Packages, folder: Path) -> None:
    """The unpacked library beside the programs that it loads."""
    for library in (packages.root / _LIBRARIES).glob("libbpf.so.1*"):
        shutil.copy(library, folder / "bpf" / "libbpf.so.1")


def _new(packages: Packages, folder: Path) -> None:
    packages.refresh()
    packages.unpack("criu", "btrfs-progs", "clang", "libbpf-dev")
    for program in ("usr/sbin/criu", "usr/bin/btrfs", "usr/sbin/mkfs.btrfs"):
        packages.put(program, folder / "bin")
    put_clang(packages, folder)


def put_clang(packages: Packages, folder: Path) -> None:
    """The unpacked compiler as a command.

    Raises:
        Impossible: it is not where the suite has it.
    """
    clang = next((packages.root / "usr/lib").glob("llvm-*/bin/clang"), None)
    if clang is None:
        raise Impossible(f"clang of {NEWER} has no program llvm-*/bin/clang")
    packages.put(str(clang.relative_to(packages.root)), folder / "bpf")


def _gvisor(folder: Path) -> None:
    packages = Packages(folder / "gvisor", GVISOR)
    packages.refresh()
    packages.unpack("runsc", alone=True)
    (program,) = packages.root.glob("usr/*bin/runsc")
    # By no loader: it starts itself again by the name of what runs.
    shutil.copy(program, folder / "bin" / "runsc")
    shutil.rmtree(folder / "gvisor")


def _image(folder: Path) -> None:
    new = folder / "images.new"
    shutil.rmtree(new, ignore_errors=True)
    source = folder / "image.sources"
    source.write_text(own_source(IMAGE))
    script = folder / "own" / "root" / "usr/bin/mmdebstrap"
    run(
        [
            *("perl", str(script), "--mode=root", "--variant=minbase", "--format=directory"),
            f"--include={','.join(IMAGE_PACKAGES)}",
            *("", str(new), str(source)),
        ]
    )
    # Sources of the machine that made it are no business of those who work in it.
    for path in (new / "etc/apt/sources.list.d").iterdir():
        path.unlink()
    (new / "etc/hosts").write_text("127.0.0.1 localhost sandbox\n::1 localhost\n")
    base = folder / "images" / "base"
    shutil.rmtree(base, ignore_errors=True)
    new.rename(base)


def _effects(source: Path, folder: Path) -> None:
    compile_bpf(source, folder, folder / "bpf" / "effects.o")


def compile_bpf(source: Path, folder: Path, target: Path) -> None:
    """A BPF object, by the tools of a folder.

    Raises:
        Impossible: the compiler refuses it.
    """
    root = folder / "newer" / "root"
    run(
        [
            str(folder / "bpf" / "clang"),
            *("-target", "bpf", "-mcpu=v3", "-O2", "-g", "-Wall", "-Werror", "-nostdinc"),
            *("-isystem", str(root / "usr/include")),
            *("-isystem", str(root / "usr/include/x86_64-linux-gnu")),
            *("-c", str(source), "-o", str(target)),
        ]
    )


def provide(what: str, install: Callable[[Path], Path]) -> None:
    """Install into the cache, or say that it is skipped and why: what needs it skips, too."""
    try:
        print(install(cache_folder()))
    except Impossible as error:
        print(f"SKIPPED {what}: {error}", file=sys.stderr)


if __name__ == "__main__":
    provide("sandbox parts", install)
