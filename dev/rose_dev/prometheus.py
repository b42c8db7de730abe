"""Prometheus and promtool for tests of alerts and dashboards; nothing is installed on the machine.

Taken from ``PATH``, else from the cache, else unpacked into the cache from the distribution's own
package (Debian, Ubuntu). Building them from Go modules would take longer than the rest together.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rose_dev.cluster.parts import cache_root
from rose_dev.errors import NotSupported
from rose_dev.shell import run

TOOLS = ("prometheus", "promtool")
_SECONDS = 300.0

Log = Callable[[str], None]


def find(tool: str) -> Path | None:
    """A tool's binary, None when it is not here."""
    on_path = shutil.which(tool)
    cached = cache_root() / "prometheus" / tool
    return Path(on_path) if on_path else cached if cached.exists() else None


def provide(log: Log = print) -> None:
    """Unpack what is missing into the cache.

    Raises:
        NotSupported: there is no ``apt-get`` here.
        CommandFailed: the package cannot be fetched.
    """
    if all(map(find, TOOLS)):
        return
    if shutil.which("apt-get") is None:
        message = "prometheus and promtool are missing; put them on PATH to test alerts"
        raise NotSupported(message)
    log("[cluster] unpacking prometheus and promtool into the cache")
    folder = cache_root() / "prometheus"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        run(["apt-get", "-qq", "download", "prometheus"], seconds=_SECONDS, cwd=Path(scratch))
        (package,) = Path(scratch).glob("*.deb")
        run(["dpkg", "-x", package, scratch], seconds=_SECONDS)
        for tool in TOOLS:
            (Path(scratch) / "usr/bin" / tool).replace(folder / tool)
