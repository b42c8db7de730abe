"""The environment of the real engine: stock SGLang in its own virtual environment.

The engine's packages (its own torch among them) never mix with ROSE's, so the engine lives in
``$ROSE_CACHE/engine/sglang-VERSION/venv`` with every version pinned by ``engine_constraints.txt``.
``python -m rose_dev.engine_environment`` makes it (a minute on a warm network, about 10 GB) and
prints the path of its Python on the last line of stdout; run again it answers at once. Several
callers at once wait for the first one. Next step: ``rose_engines.sglang.launch`` runs in it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rose_engines

SGLANG_VERSION = "0.5.23"
PYTHON_VERSION = "3.11"
CONSTRAINTS = Path(__file__).with_name("engine_constraints.txt")
# What an engine imports on CPU; the last three are ROSE's own needs, which SGLang brings along.
NEEDED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "msgspec",
    "numpy",
    "zstandard",
)


# In front of SGLang's CUDA kernels on a machine without a GPU.
CPU_PATH = Path(rose_engines.__file__).with_name("sglang") / "paths" / "cpu"


class SetupFailed(Exception):
    """The environment could not be made; the message says at which step and what to do."""


def cache_folder() -> Path:
    """``$ROSE_CACHE``, by default ``~/.cache/rose``."""
    return Path(os.environ.get("ROSE_CACHE") or Path.home() / ".cache" / "rose")


def environment_folder(cache: Path | None = None) -> Path:
    """The engine's virtual environment, whether it exists or not."""
    return (cache or cache_folder()) / "engine" / f"sglang-{SGLANG_VERSION}" / "venv"


def engine_python(cache: Path | None = None) -> Path:
    """The engine's Python, whether it exists or not."""
    return environment_folder(cache) / "bin" / "python"


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


def fingerprint() -> str:
    """What the environment is made of; another value means it must be made anew."""
    text = f"{SGLANG_VERSION} {PYTHON_VERSION}\n".encode() + CONSTRAINTS.read_bytes()
    return hashlib.sha256(text).hexdigest()


def is_ready(cache: Path | None = None) -> bool:
    """Whether the environment is complete and of the present pins."""
    return stamped(environment_folder(cache), fingerprint())


def stamped(folder: Path, wanted: str) -> bool:
    """Whether the virtual environment was finished, and made of what ``wanted`` names."""
    try:
        stamp = (folder / ".rose-stamp").read_text()
    except OSError:
        return False
    return stamp == wanted and (folder / "bin" / "python").exists()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One installer at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"[set-up] {text}", file=sys.stderr, flush=True)


def run_step(step: str, command: list[str], environment: dict[str, str]) -> None:
    """Run a command and say so before and after.

    Raises:
        SetupFailed: it failed.
    """
    _say(step)
    started = time.monotonic()
    result = subprocess.run(command, env=environment, check=False)  # output goes to the terminal
    if result.returncode:
        raise SetupFailed(f"{step}: exit code {result.returncode} from {' '.join(command)}")
    _say(f"{step}: done in {time.monotonic() - started:.0f} s")


def installer_environment(folder: Path) -> dict[str, str]:
    """The installer's environment, for a virtual environment in ``folder``."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return environment | {"VIRTUAL_ENV": str(folder)}


def install(cache: Path | None = None) -> Path:
    """Make the environment unless it is there; returns the engine's Python.

    Raises:
        SetupFailed: a step failed; the next call starts over.
    """
    cache = cache or cache_folder()
    folder = environment_folder(cache)
    with locked(folder.parent / ".lock"):
        if not is_ready(cache):
            _make(cache, folder)
    return engine_python(cache)


def _make(cache: Path, folder: Path) -> None:
    uv = str(find_uv(cache))
    environment = installer_environment(folder)
    run_step(
        f"engine environment in {folder}",
        [uv, "venv", "--quiet", "--clear", "--python", PYTHON_VERSION, str(folder)],
        environment,
    )
    run_step(
        f"stock SGLang {SGLANG_VERSION} (about 10 GB; the first time downloads PyTorch)",
        [uv, "pip", "install", "-c", str(CONSTRAINTS), f"sglang=={SGLANG_VERSION}"],
        environment,
    )
    python = str(folder / "bin" / "python")
    # Once, for all engine starts: without byte code every start compiles SGLang anew (30 s). Some
    # files of the wheels are templates that do not compile, so the exit code says nothing.
    packages = [str(path) for path in _packages(folder)]
    _say("byte code of the engine (once)")
    subprocess.run(
        [python, "-m", "compileall", "-qq", "-j", "0", *packages],
        env=environment,
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    # The rest of the byte code is written by importing what every engine process imports, which
    # also proves that the engine starts on this machine.
    shim = {"PYTHONPATH": str(CPU_PATH), "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    imports = "; ".join(f"import {name}" for name in NEEDED)
    run_step(
        "first import of the engine", [python, "-W", "ignore", "-c", imports], environment | shim
    )
    (folder / ".rose-stamp").write_text(fingerprint())


def _packages(folder: Path) -> Iterator[Path]:
    """What an engine on CPU imports at every start."""
    site = folder / "lib" / f"python{PYTHON_VERSION}" / "site-packages"
    for name in ("sglang/srt", "sglang/lang", "sglang/utils.py", "transformers/models/qwen3"):
        if (site / name).exists():
            yield site / name


def main(argv: list[str] | None = None) -> int:
    """``python -m rose_dev.engine_environment [--print-only]``."""
    parser = argparse.ArgumentParser(prog="rose_dev.engine_environment", description=__doc__)
    parser.add_argument("--print-only", action="store_true", help="only print the Python's path")
    arguments = parser.parse_args(argv)
    try:
        python = engine_python() if arguments.print_only else install()
    except SetupFailed as error:
        _say(f"FAILED: {error}")
        return 1
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
