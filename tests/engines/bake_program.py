"""Runs in the environment of the engine: launches ROSE's kernels for a GPU that is not there.

``bake_program.py ARCHITECTURE WIDTH ...`` prints how many of them Triton found in its cache, how
many it compiled, and where it found its own library for the driver.
"""

from __future__ import annotations

import os
import sys

import triton
from triton import knobs
from triton.backends.nvidia import driver
from triton.runtime import build

from rose_engines.bake import AbsentGpu, touch_kernels

found = {True: 0, False: 0}


def count(*_: object, cache_hit: bool, **__: object) -> None:
    """What Triton's own compiler says of each kernel."""
    found[cache_hit] += 1


def refuse(*_: object, **__: object) -> str:
    """In the place of the C compiler."""
    raise RuntimeError("compiled again")


knobs.compilation.listener = count
triton.runtime.driver.set_active(AbsentGpu(int(sys.argv[1])))
touch_kernels([int(width) for width in sys.argv[2:]])
build._build = refuse
helper = "none"
try:
    helper = build.compile_so_from_file(
        src_path=os.path.join(driver.dirname, "driver.c"), name="cuda_utils",
        library_dirs=[driver.libdevice_dir, "/lib/x86_64-linux-gnu"],
        include_dirs=driver.include_dirs, libraries=driver.libraries,
    )  # fmt: skip
except RuntimeError as error:
    helper = str(error).replace(" ", "-")
print(found[True], found[False], helper)
