"""NVIDIA's own programs from Debian's ``non-free``, for tests without a GPU; nothing is installed.

Packages are unpacked into ``$ROSE_CACHE/nvidia/SUITE/PACKAGE``. Where they come from is what this
machine's apt is set up with: the archive of its ``main`` component, asked for ``non-free`` in a
configuration of our own, so that the machine's stays as it is. Each Debian suite has one driver:

| suite | driver |
|---|---|
| bookworm | 535 |
| trixie | 550 |

Next step: a test that needs a program calls ``unpacked`` and is skipped with the reason it raises.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from rose_dev.errors import CommandFailed, NotSupported
from rose_dev.parts import cache_root
from rose_dev.shell import locked, run

SUITES = {535: "bookworm", 550: "trixie"}
"""Driver, and the Debian suite that has it."""

_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_SECONDS = 120.0
_STAMP = ".unpacked"


def unpacked(package: str, driver: int) -> Path:
    """A folder with the package's files, as below ``/``.

    Raises:
        NotSupported: this machine's apt has no Debian archive, or the package is not in it.
    """
    folder = cache_root() / "nvidia" / SUITES[driver] / package
    with locked(folder.with_name(f"{package}.lock")):
        if not (folder / _STAMP).exists():
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _unpack(package, SUITES[driver], folder)
            except CommandFailed as error:
                text = f"{package} of driver {driver} cannot be had from Debian non-free: {error}"
                raise NotSupported(text) from error
            (folder / _STAMP).touch()
    return folder


def _unpack(package: str, suite: str, folder: Path) -> None:
    archive = _archive()
    with tempfile.TemporaryDirectory(prefix="rose-apt-") as scratch:
        place = Path(scratch)
        place.chmod(0o755)  # apt fetches as a user of its own
        options = _configure(place, archive, suite)
        run(["apt-get", *options, "-qq", "update"], seconds=_SECONDS)
        run(["apt-get", *options, "-qq", "download", package], seconds=_SECONDS, cwd=place)
        (found,) = place.glob("*.deb")
        run(["dpkg", "-x", found, folder], seconds=_SECONDS)


def _archive() -> str:
    """Address of the Debian archive in this machine's own configuration.

    Raises:
        NotSupported: there is none.
    """
    if shutil.which("apt-get") is None or not _KEYRING.exists():
        raise NotSupported("NVIDIA's programs are taken from Debian, and this is no Debian machine")
    form = "--format=$(REPO_URI) $(COMPONENT)"
    listed = run(["apt-get", "indextargets", form, "Created-By: Packages"], seconds=_SECONDS)
    rows = [line.split() for line in listed.stdout.splitlines()]
    found = [uri for uri, part in rows if part == "main" and uri.rstrip("/").endswith("/debian")]
    if not found:
        raise NotSupported("this machine's apt has no Debian archive with the component main")
    return found[0]


def _configure(place: Path, archive: str, suite: str) -> list[str]:
    """An apt configuration with one archive; returns the options that select it."""
    sources = place / "rose.list"
    sources.write_text(f"deb [signed-by={_KEYRING}] {archive} {suite} non-free\n")
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (place / folder).mkdir(parents=True)
    (place / "state/status").touch()
    chosen = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "-",
        "Dir::State": place / "state",
        "Dir::State::status": place / "state/status",
        "Dir::Cache": place / "cache",
    }
    # As ourselves: apt's user may not enter a folder of a test.
    flags = [f"-o{name}={value}" for name, value in chosen.items()]
    return [*flags, "-oAPT::Sandbox::User=root"]
