"""Build the NVML library of ``nvml.c`` once, and put it before the real one in this process.

It needs a C compiler and nothing else; where there is none, what needs it is skipped by that name.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rose_dev.cluster.parts import cache_root
from rose_dev.errors import DevelopmentError, NotSupported
from rose_dev.gpu import layout

STATE = "ROSE_NVML_STATE"
"""Environment variable that names the state file to the library."""
SONAME = "libnvidia-ml.so.1"
_SOURCE = Path(__file__).with_name("nvml.c")
_FLAGS = ("-shared", "-fPIC", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread")


def compiler() -> str:
    """Path of the C compiler.

    Raises:
        NotSupported: there is none.
    """
    found = shutil.which(os.environ.get("CC", "cc"))
    if found is None:
        message = "no C compiler (cc): the NVML library cannot be built; install gcc"
        raise NotSupported(message)
    return found


def stubs() -> str:
    """C for every name of NVML: what ``nvml.c`` defines itself takes the place of these."""
    lines = ['#include "layout.h"', "int rose_begin(int);"]
    lines += [
        f"__attribute__((weak)) int {name}(void)"
        f" {{ int code = rose_begin(F_{name}); return code ? code : 3; }}"
        for name in layout.function_names()
        if name != "nvmlErrorString"  # it answers a text
    ]
    return "\n".join(lines) + "\n"


def library() -> Path:
    """The built library, named as NVIDIA's; built at the first call.

    Raises:
        NotSupported: no compiler, or nvidia-ml-py is missing.
        DevelopmentError: it does not compile; says why.
    """
    cc = compiler()
    sources = {"layout.h": layout.c_header(), "stubs.c": stubs(), "nvml.c": _SOURCE.read_text()}
    digest = hashlib.sha256(repr((cc, _FLAGS, sorted(sources.items()))).encode()).hexdigest()[:16]
    target = cache_root() / "gpu" / digest / SONAME
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        for file, text in sources.items():
            (folder / file).write_text(text)
        command = [cc, *_FLAGS, f"-Wl,-soname,{SONAME}", "-o", SONAME, "nvml.c", "stubs.c"]
        built = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if built.returncode:
            message = f"{' '.join(command)} failed:\n{built.stderr[-4000:]}"
            raise DevelopmentError(message)
        (folder / SONAME).chmod(0o755)
        (folder / SONAME).replace(target)
    return target


def environment(state: Path) -> dict[str, str]:
    """What a process needs for its ``libnvidia-ml.so.1`` to be ours, with this state."""
    before = os.environ.get("LD_LIBRARY_PATH")
    folder = str(library().parent)
    return {STATE: str(state), "LD_LIBRARY_PATH": f"{folder}:{before}" if before else folder}


@contextlib.contextmanager
def preloaded(state: Path) -> Iterator[None]:
    """Make ``pynvml`` in this process use the library with this state.

    The dynamic linker gives who asks for a library what was loaded under its soname before.

    Raises:
        NotSupported: see ``library``; or another NVML has been loaded before.
    """
    ours = ctypes.CDLL(str(library()))
    pynvml = importlib.import_module("pynvml")
    loaded = pynvml.nvmlLib or ctypes.CDLL(SONAME)
    if not hasattr(loaded, "rose_begin"):
        message = "this process has loaded a real NVML before; use a new process"
        raise NotSupported(message)
    before = os.environ.get(STATE)
    os.environ[STATE] = str(state)
    try:
        yield
    finally:
        while ours.nvmlShutdown() == 0:  # whatever was left open would keep the old state
            pass
        if before is None:
            del os.environ[STATE]
        else:
            os.environ[STATE] = before
