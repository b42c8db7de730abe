"""Compiled kernels of engines: baked into the image, laid over by a private folder per slot.

SGLang and the libraries below it compile kernels when they are first needed, with nvcc, Triton,
CuTe and DeepGEMM, and keep them in folders that variables name. Without a cache that is minutes of
compiler and GPU beside serving at every start. A folder that engines of several teams could write
would let one run its code in another's process. So:

| folder | owner, mode | lives |
|---|---|---|
| ``BAKED``, part of the engine image | root, nobody writes | with the image |
| ``ROOT/<host>/<made by>/<slot>``, engine alive | the engine's user, 0700 | as long as the slot |
| the same between two engines of the slot | root, 0700 | " |

``made by`` stands for the engine's packages, what is baked and the GPU driver: a host of another
image or under another driver begins anew, and removes what the earlier one left. One that cannot
learn it (``UNKNOWN``) uses nothing that was compiled before, by its own engines neither, and
removes nothing: the next host may know. A slot belongs to one lease, so a restarted engine finds
what it has compiled and no other engine ever does. A fresh folder begins as a copy of what is
baked: files that are only read are links, what a build system appends to is copied, locks are left
out, and Triton's lists of files name those in the folder. An engine replaces a link by a file of
its own. Next step: ``accounts`` opens and closes it with the engine's user.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path

from rose_engines.bake import MANIFEST

_log = logging.getLogger(__name__)

BAKED = Path("/opt/rose/kernels")
# Below the host's scratch, which is a disk and not the node's memory.
ROOT = Path(tempfile.gettempdir()) / "rose-kernels"
FOLDERS = {
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep-gemm",
    "DG_JIT_CACHE_DIR": "deep-gemm",
    "TRITON_CACHE_DIR": "triton",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "TILELANG_CACHE_DIR": "tilelang",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attention",
    "CUTE_DSL_CACHE_DIR": "cute-dsl",
    "QUACK_CACHE_DIR": "quack",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch-extensions",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
}
"""The variable that names each cache, and its folder. SGLang's own covers what its JIT compiles."""

# Read as they are, and large; whatever else there is may be appended to in place.
_READ_ONLY = frozenset(
    {".so", ".cubin", ".fatbin", ".ptx", ".o", ".hsaco", ".ttir", ".ttgir", ".llir", ".mlir"}
)
_LOCKS = frozenset({".lock"})
# Triton names a kernel's files by their whole paths, and takes none where one of them is missing.
_LISTS = "__grp__"
# A folder of a package has its version in its name, save those that setuptools made of old. To read
# the description of each took an engine host 0.1 s of CPU time.
_PACKAGES = """
import os, sys
found = set()
for folder in filter(os.path.isdir, sys.path):
    for name in os.listdir(folder):
        if name.endswith(".dist-info"):
            found.add(name)
        elif name.endswith(".egg-info"):
            import importlib.metadata
            one = importlib.metadata.Distribution.at(os.path.join(folder, name))
            found.add(f"{one.name}=={one.version}")
print(sys.version, *sorted(found))
"""
_SECONDS = 60.0
MADE_BY = re.compile(r"[0-9a-f]{16}")
UNKNOWN = "0" * 16
"""Nobody knows what makes the kernels here: none is used again, and no others are removed."""


def made_by(python: Path, driver: str | None, baked: Path = BAKED) -> str:
    """What makes an engine's kernels: its packages, the files that are baked, and the GPU driver.

    Args:
        python: the engine's.
        driver: version of the GPU driver; None = there is none, or it does not say.
        baked: as ``BAKED``.

    Returns:
        16 hexadecimal digits; ``UNKNOWN`` where the engine's Python does not say its packages.
    """
    try:
        done = subprocess.run(  # the platform's own Python
            [python, "-c", _PACKAGES],
            capture_output=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning(
            "%s does not say its packages, so every engine compiles its kernels anew: %s",
            python,
            error,
        )
        return UNKNOWN
    text = b"\0".join((done.stdout, _manifest_of(baked), (driver or "").encode()))
    return hashlib.sha256(text).hexdigest()[:16]


def _manifest_of(baked: Path) -> bytes:
    """What is baked: its manifest, and the names and sizes of all files.

    The manifest alone counts what the build compiled, and nothing that was copied in beside it. A
    library names its kernels by what they were made of, and most are used through links: of two
    images with the same names and sizes, one's copies serve the other.
    """
    manifest = baked / MANIFEST
    files = sorted(
        f"{path.relative_to(baked)} {path.lstat().st_size}"
        for path in baked.rglob("*")
        if not path.is_dir()
    )
    return b"\0".join(
        (manifest.read_bytes() if manifest.is_file() else b"", *map(str.encode, files))
    )


def root_of(slots: Path, made: str) -> Path:
    """Where the host of this run directory keeps them: hosts of one machine share its scratch.

    Args:
        slots: the run directory's folder of slots.
        made: ``made_by``.
    """
    return ROOT / hashlib.sha256(str(slots.resolve()).encode()).hexdigest()[:16] / made


def environment(folder: Path) -> dict[str, str]:
    """Variables that lead an engine to its folder."""
    return {name: str(folder / part) for name, part in FOLDERS.items()}


def open_for(slot_uid: str, uid: int, root: Path, baked: Path = BAKED) -> Path:
    """A slot's folder, the engine's user its owner; made from what is baked where it is new.

    Raises:
        OSError: it cannot be made, or another process made it.
    """
    root.mkdir(parents=True, exist_ok=True)
    for place in (root.parent.parent, root.parent, root):
        if place.is_symlink() or place.stat().st_uid != os.geteuid():
            raise PermissionError(f"{place} is not the engine host's")
        place.chmod(0o711)
    folder = root / slot_uid
    if root.name == UNKNOWN:
        shutil.rmtree(folder, ignore_errors=True)
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(prefix=".new-", dir=root) as made:
            draft = Path(made) / "cache"
            draft.mkdir(mode=0o700)
            if baked.is_dir():
                _copy_baked(baked, draft, folder)
            draft.rename(folder)
    _give(folder, uid)
    return folder


def close(slot_uid: str, root: Path) -> None:
    """The engine has ended: nobody enters its folder until the slot's next one."""
    with contextlib.suppress(FileNotFoundError):
        _own(root / slot_uid, os.geteuid())


def prune(living: Collection[str], root: Path) -> None:
    """Remove the folders of slots that are no more, and all that another image or driver made."""
    known = root.name != UNKNOWN
    others = [other for other in root.parent.glob("*") if other.name != root.name] if known else []
    gone = [folder for folder in root.glob("*") if folder.name not in living]
    for folder in (*gone, *others):
        shutil.rmtree(folder, ignore_errors=True)


def _copy_baked(source: Path, target: Path, named: Path) -> None:
    """Put what is baked into a new folder.

    Args:
        source: what is baked.
        target: the folder as it is called now.
        named: the same as it will be called.
    """
    for entry in sorted(source.iterdir()):
        place = target / entry.name
        if entry.is_dir() and not entry.is_symlink():
            place.mkdir(mode=0o700)
            _copy_baked(entry, place, named / entry.name)
        elif entry.name.startswith(_LISTS):
            place.write_text(_renamed(entry.read_text(), named))
        elif entry.suffix in _READ_ONLY:
            place.symlink_to(entry)
        elif entry.suffix not in _LOCKS:
            shutil.copy2(entry, place)


def _renamed(text: str, folder: Path) -> str:
    """One of Triton's lists, of the files in this folder; what is no list stays as it is."""
    try:
        listed = json.loads(text)
        files = {name: str(folder / name) for name in listed["child_paths"]}
    except (ValueError, TypeError, KeyError):
        return text
    return json.dumps(listed | {"child_paths": files})


def _give(folder: Path, uid: int) -> None:
    """Change the owner of everything; links themselves, never what they lead to."""
    for parent, folders, files in os.walk(folder, followlinks=False):
        for name in (*folders, *files):
            os.chown(Path(parent) / name, uid, uid, follow_symlinks=False)
    _own(folder, uid)  # last: from here on the engine's user may enter


def _own(folder: Path, uid: int) -> None:
    os.chown(folder, uid, uid, follow_symlinks=False)
