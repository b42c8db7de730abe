"""The tap's program in the kernel, for this checkout: ``python -m rose_dev.tap_parts``.

Into ``bpf`` of the Python environment, where ``rose_agent.tap.kernel_program`` looks: ``tokens.o``,
compiled here, and libbpf. The compiler is that of ``make sandbox`` where it is there, else the same
one, unpacked into ``$ROSE_CACHE/tap``. Where it cannot be had the tap reads packet by packet.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import rose_agent.tap
from rose_agent.tap.kernel_program import FOLDER
from rose_dev.environments import log
from rose_dev.sandbox_parts import NEWER, Packages, compile_bpf, provide, put_clang, put_libbpf


def install(cache: Path) -> Path:
    """Compile the program; returns where it is.

    Raises:
        Impossible: there is no compiler and none can be had.
    """
    places = (cache / "sandbox", cache / "tap")
    tools = next((one for one in places if (one / "bpf" / "clang").exists()), None)
    if tools is None:
        tools = cache / "tap"
        _fetch(tools)
    FOLDER.mkdir(exist_ok=True)
    shutil.copy(tools / "bpf" / "libbpf.so.1", FOLDER)
    source = Path(rose_agent.tap.__file__).with_name("tokens.bpf.c")
    compile_bpf(source, tools, FOLDER / "tokens.o")
    return FOLDER


def _fetch(tools: Path) -> None:
    log(f"tap: clang ({NEWER}) and libbpf")
    (tools / "bpf").mkdir(parents=True, exist_ok=True)
    own, newer = Packages(tools / "own", None), Packages(tools / "newer", NEWER)
    own.refresh()
    own.unpack("libbpf1", alone=True)
    put_libbpf(own, tools)
    newer.refresh()
    newer.unpack("clang", "libbpf-dev")
    put_clang(newer, tools)


if __name__ == "__main__":
    provide("the tap's program in the kernel", install)
