"""Where the programs and images of the real runtime lie; ``make sandbox`` puts them there.

A host's image that has them brings its own folder by ``ROSE_SANDBOX_PARTS``.
Next step: ``runc`` runs them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rose_sandbox.errors import Unavailable

_OF_FILES = ("btrfs", "mkfs.btrfs", "tar", "ip", "mount", "umount", "nsenter", "unshare")
PROGRAMS = (
    *("runc", "criu", *_OF_FILES),
    "gzip",  # CRIU packs what lies in memory with it; without, a dump succeeds and no restore does
)
"""Of the runtime ``runc``."""
GVISOR = ("runsc", *_OF_FILES)
"""Of the runtime ``runsc``."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Parts:
    """A folder with ``bin`` (programs), ``images`` (root folders by name) and ``bpf`` (objects)."""

    folder: Path

    @property
    def images(self) -> Path:
        """Root folders by name."""
        return self.folder / "images"

    @property
    def bpf(self) -> Path:
        """The inspector's compiled program."""
        return self.folder / "bpf" / "effects.o"

    @property
    def path(self) -> str:
        """``PATH`` of the runtime's programs."""
        return f"{self.folder / 'bin'}:{SYSTEM_PATH}"

    def lacking(self, programs: Sequence[str] = PROGRAMS) -> tuple[str, ...]:
        """What a sandbox needs and this machine has not, by name."""
        programs = [name for name in programs if shutil.which(name, path=self.path) is None]
        rights = [] if os.geteuid() == 0 else ["root"]
        images = [] if self.images.is_dir() and any(self.images.iterdir()) else ["images"]
        return (*rights, *programs, *images)


def find_parts(programs: Sequence[str] = PROGRAMS) -> Parts:
    """The parts of this machine, whole.

    Args:
        programs: of the runtime.

    Raises:
        Unavailable: something is missing; the text names it.
    """
    cache = Path(os.environ.get("ROSE_CACHE") or Path.home() / ".cache" / "rose")
    parts = Parts(Path(os.environ.get("ROSE_SANDBOX_PARTS") or cache / "sandbox"))
    lacking = parts.lacking(programs)
    if lacking:
        raise Unavailable(
            f"sandboxes need {', '.join(lacking)}, not in {parts.folder} or on PATH: "
            "run `make sandbox` as root"
        )
    return parts
