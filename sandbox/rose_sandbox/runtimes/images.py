"""Images of a sandbox's processes as one file, and back.

Next step: ``container`` packs what the runtime's program saved.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from rose_sandbox.runtimes.programs import run


async def pack_images(path: str, images: Path, into: Path) -> None:
    """A folder of images as one file, the same bytes for the same images; the folder is gone.

    Raises:
        RuntimeFailed: the disk is full.
    """
    await run(
        path,
        *("tar", "--create", "--sort=name", "--format=pax", "--sparse", "--numeric-owner"),
        *("--file", into, "--directory", images, "."),
    )
    shutil.rmtree(images, ignore_errors=True)


async def unpack_images(path: str, file: Path, images: Path) -> None:
    """Images of ``pack_images`` into a folder that is there; any number of restores may share it.

    Raises:
        RuntimeFailed: the file is torn, or the disk full.
    """
    await run(path, *("tar", "--extract", "--file", file, "--directory", images))
    open_images(images)


def open_images(images: Path) -> None:
    """Let tasks read them that are not yet, or already, another user; the folder above is shut."""
    for path in images.iterdir():
        path.chmod(0o644)
    images.chmod(0o755)
