"""How the virtual environment of an engine is made: once, by one installer, anew after a change.

An engine's packages (its own torch among them) never mix with ROSE's, so each kind of engine lives
in ``$ROSE_CACHE/engine/NAME/venv``. A stamp in it, written last, names what it was made of; without
it, or with another one, it is made anew. Several callers at once wait for the first one.
Next step: ``engine_environment`` (SGLang) and ``vllm_environment`` say what goes in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rose_dev.shell import locked

PYTHON_VERSION = "3.11"
_STAMP = ".rose-stamp"


class SetupFailed(Exception):
    """The environment could not be made; the message says at which step and what to do."""


def cache_folder() -> Path:
    """``$ROSE_CACHE``, by default ``~/.cache/rose``."""
    return Path(os.environ.get("ROSE_CACHE") or Path.home() / ".cache" / "rose")


def find_uv(cache: Path) -> Path:
    """The installer: ROSE's own copy, or the one on PATH.

    Raises:
        SetupFailed: there is none.
    """
    own = cache / "uv" / "bin" / "uv"
    if own.exists():
        return own
    found = shutil.which("uv")
    if found is None:
        raise SetupFailed(f"no uv at {own} nor on PATH; run `make venv` first")
    return Path(found)


def log(text: str) -> None:
    """To whoever waits for the installer."""
    print(f"[set-up] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Steps:
    """What fills a fresh environment.

    Attributes:
        folder: the virtual environment.
        uv: the installer.
        environment: of every step.
    """

    folder: Path
    uv: Path
    environment: dict[str, str]

    @property
    def python(self) -> str:
        """The environment's Python."""
        return str(self.folder / "bin" / "python")

    @property
    def site(self) -> Path:
        """Where its packages lie."""
        return self.folder / "lib" / f"python{PYTHON_VERSION}" / "site-packages"

    def run(self, step: str, command: list[str], more: dict[str, str] | None = None) -> None:
        """Run a command and say so before and after.

        Raises:
            SetupFailed: it failed.
        """
        log(step)
        started = time.monotonic()
        # Its output goes to the terminal.
        result = subprocess.run(command, env=self.environment | (more or {}), check=False)
        if result.returncode:
            raise SetupFailed(f"{step}: exit code {result.returncode} from {' '.join(command)}")
        log(f"{step}: done in {time.monotonic() - started:.0f} s")

    def install(self, step: str, *arguments: str) -> None:
        """Install packages."""
        self.run(step, [str(self.uv), "pip", "install", *arguments])


@dataclass(frozen=True)
class Environment:
    """One kind of engine's environment.

    Attributes:
        name: of its folder, with the version.
        title: for people.
        fingerprint: what it is made of; another value means it must be made anew.
        fill: installs into a fresh one.
    """

    name: str
    title: str
    fingerprint: Callable[[], str]
    fill: Callable[[Steps], None]

    def folder(self, cache: Path | None = None) -> Path:
        """The virtual environment, whether it exists or not."""
        return (cache or cache_folder()) / "engine" / self.name / "venv"

    def python(self, cache: Path | None = None) -> Path:
        """Its Python, whether it exists or not."""
        return self.folder(cache) / "bin" / "python"

    def is_ready(self, cache: Path | None = None) -> bool:
        """Whether it is complete and of the present pins."""
        try:
            stamp = (self.folder(cache) / _STAMP).read_text()
        except OSError:
            return False
        return stamp == self.fingerprint() and self.python(cache).exists()

    def install(self, cache: Path | None = None) -> Path:
        """Make it unless it is there; returns its Python.

        Raises:
            SetupFailed: a step failed; the next call starts over.
        """
        cache = cache or cache_folder()
        with locked(self.folder(cache).parent / ".lock"):  # one installer at a time
            if not self.is_ready(cache):
                self._make(cache)
        return self.python(cache)

    def _make(self, cache: Path) -> None:
        folder = self.folder(cache)
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        steps = Steps(folder, find_uv(cache), inherited | {"VIRTUAL_ENV": str(folder)})
        steps.run(
            f"{self.title} environment in {folder}",
            [
                str(steps.uv),
                *("venv", "--quiet", "--clear", "--python"),
                PYTHON_VERSION,
                str(folder),
            ],
        )
        self.fill(steps)
        (folder / _STAMP).write_text(self.fingerprint())

    def command(self, *, print_only: bool) -> int:
        """Make it, or only tell; prints the path of its Python on the last line of stdout."""
        try:
            python = self.python() if print_only else self.install()
        except SetupFailed as error:
            log(f"FAILED: {error}")
            return 1
        print(python)
        return 0
