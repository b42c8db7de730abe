"""Compiles ROSE's kernels where there is no GPU, for an image that engines start from.

``python -m rose_engines.bake FOLDER`` runs in the engine's Python while an image is built. The
functions that an engine calls are called here, with a driver that names a GPU which is not there
and launches nothing: so what Triton looks up later is what it has put away now, by its own keys.
Beside them lies Triton's own library for the driver, which it compiles with a C compiler at each
first start. What needs a model's shapes (SGLang's and FlashInfer's kernels) is not made here.

``FOLDER/baked.json`` says what was made, of what and for which GPUs. A base without Triton or torch
gets nothing, and the reason is printed. Next step: ``rose_agent.host.users.kernel_caches`` lays a
slot's own folder over it.
"""

# Triton's and torch's own functions have no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120)
"""Compute capabilities, times ten: A100; A10, A40; L4, L40S; H100, H200; B200; B300; RTX PRO."""
MANIFEST = "baked.json"
WIDTHS = (1, 2, 4, 8)
# Where runtimes and distributions put the driver's library: its folder is in Triton's key.
_LIBCUDA = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/lib64")


class _Utils:
    """Triton's library for the driver, without a driver."""

    def get_device_properties(self, _device: int) -> dict[str, int]:
        """Enough shared memory for any kernel."""
        return {"max_shared_mem": 1 << 30, "multiprocessor_count": 1, "warpSize": 32}

    def load_binary(self, *_: object) -> tuple[None, None, int, int, int]:
        """Nothing is loaded."""
        return None, None, 0, 0, 1024

    def unload_module(self, _module: object) -> None:
        """Nothing was."""


class _Nowhere:
    """A launcher that launches nothing."""

    def __init__(self, *_: object) -> None:
        pass

    def __call__(self, *_: object, **__: object) -> None:
        pass


class AbsentGpu:
    """A driver of Triton's whose one GPU is not there.

    Args:
        architecture: its compute capability, times ten.
    """

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget  # noqa: PLC0415  # only inside engines

        self.utils = _Utils()
        self.launcher_cls = _Nowhere
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> object:
        """What kernels are compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """The only one. Triton remembers compiled kernels by it: one architecture per process."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """None."""
        return 0


def touch_kernels(widths: Sequence[int] = WIDTHS) -> None:
    """Call whatever launches a kernel of ROSE's, with aligned memory and without.

    Torch aligns what it allocates, but a parameter may be a part of another.

    Args:
        widths: bytes of an element.
    """
    import torch  # noqa: PLC0415  # only inside engines

    from rose_engines.ondevice import digest_kernel, scatter_kernel  # noqa: PLC0415  # need Triton
    from rose_engines.weights.fused_scatter import CHUNK, RUN  # noqa: PLC0415

    kinds = {1: (torch.uint8, torch.int8), 2: (torch.int16,), 4: (torch.int32,), 8: (torch.int64,)}
    for kind in (kind for width in widths for kind in kinds[width]):
        target = torch.zeros(64, dtype=kind)
        for shift in (0, 1):
            digest_kernel.lanes(target[None, shift:], 0, 0, 1)
        table = torch.tensor([target.data_ptr(), 0, RUN, 1], dtype=torch.int64)
        for count in (0, 1):
            offsets = torch.zeros(count, dtype=torch.int32)
            wrong = torch.zeros(1, dtype=torch.int64)
            values = torch.zeros(1, dtype=kind)
            scatter_kernel.scatter(table, offsets, values, wrong, target, CHUNK)


def bake_for(architecture: int, folder: Path) -> None:
    """Put ROSE's kernels for one architecture into Triton's cache below ``folder``.

    Once per process: Triton keeps what it has compiled in memory, by device.
    """
    import triton  # noqa: PLC0415  # only inside engines

    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    triton.runtime.driver.set_active(AbsentGpu(architecture))
    touch_kernels()


def bake_helper(folder: Path) -> bool:
    """Put Triton's library for the driver there, for the usual places of ``libcuda``.

    Returns:
        Whether there is a C compiler to make it with.
    """
    from triton.backends.nvidia import driver  # noqa: PLC0415  # only inside engines
    from triton.runtime.build import compile_so_from_file  # noqa: PLC0415

    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if compiler is None or not header.exists():
        return False
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    with tempfile.TemporaryDirectory() as stubs, _library_path(Path(stubs)):
        # Linked against an empty library of the driver's name; the real one is found at run time.
        name = driver.libraries[0]
        shared = [compiler, "-shared", "-fPIC", "-x", "c", os.devnull, f"-Wl,-soname,{name}"]
        subprocess.run([*shared, "-o", str(Path(stubs) / name)], check=True)
        for place in _LIBCUDA:
            compile_so_from_file(
                src_path=os.path.join(driver.dirname, "driver.c"),  # noqa: PTH118  # as Triton does
                name="cuda_utils",
                library_dirs=[driver.libdevice_dir, place],
                include_dirs=driver.include_dirs,
                libraries=driver.libraries,
            )
    return True


@contextlib.contextmanager
def _library_path(folder: Path) -> Iterator[None]:
    before = os.environ.get("LIBRARY_PATH")
    os.environ["LIBRARY_PATH"] = f"{folder}:{before}" if before else str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LIBRARY_PATH"]
        else:
            os.environ["LIBRARY_PATH"] = before


def manifest(folder: Path, architectures: Sequence[int], *, helper: bool) -> dict[str, Any]:
    """What was made, of what and for which GPUs."""
    made_of = {}
    for name in ("sglang", "torch", "triton", "flashinfer-python", "flashinfer-cubin"):
        with contextlib.suppress(PackageNotFoundError):
            made_of[name] = version(name)
    return {
        "made_of": made_of,
        "architectures": list(architectures),
        "kernels": sorted({path.stem for path in (folder / "triton").rglob("*.cubin")}),
        "machine_codes": sum(1 for _ in (folder / "triton").rglob("*.cubin")),
        "driver_library": helper,
    }


def main(argv: list[str] | None = None) -> int:
    """``python -m rose_engines.bake FOLDER [--architectures 90,100]``."""
    parser = argparse.ArgumentParser(prog="rose_engines.bake", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architectures", default=",".join(map(str, ARCHITECTURES)))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if arguments.one is not None:
        bake_for(arguments.one, arguments.folder)
        return 0
    try:
        import torch  # noqa: F401, PLC0415  # only inside engines
        import triton  # noqa: F401, PLC0415
    except ImportError as error:
        _log.warning("nothing is baked: %s; engines compile at their first start", error)
        return 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    wanted = [int(text) for text in arguments.architectures.split(",")]
    for one in wanted:
        command = [sys.executable, "-m", "rose_engines.bake", str(arguments.folder)]
        if subprocess.run([*command, "--one", str(one)], check=False).returncode:
            return 1
    helper = bake_helper(arguments.folder)
    made = manifest(arguments.folder, wanted, helper=helper)
    (arguments.folder / MANIFEST).write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    _log.info("%s", json.dumps(made, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
