"""``python -m rose_dev.image_sizes``: how large the Python packages of each image are.

Counted are the files of ROSE and of every distribution that the image's extras need, as they are
installed here, byte code left out: it is made from them, in the image as anywhere. The engine's
image has the packages of ``weights`` beside those of its base.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable
from pathlib import Path

from rose_dev.image import checkout, code_files, distributions

IMAGES: dict[str, tuple[str, ...]] = {
    "operator": ("operator",),
    "agent": ("agent",),
    "router": ("router",),
    "weights": ("agent", "weights"),
    "rewards": ("rewards", "batches"),
}
MEGABYTE = 1_000_000


def packages(image: str) -> dict[str, int]:
    """Bytes of every distribution in an image, ROSE's own as ``rose-gpu``."""
    own = sum(path.stat().st_size for path, _ in code_files(checkout()))
    needed = distributions("rose-gpu", IMAGES[image])
    return {"rose-gpu": own} | {name: _bytes(found) for name, found in needed.items()}


def _bytes(distribution: importlib.metadata.Distribution) -> int:
    files = (file for file in distribution.files or () if file.suffix != ".pyc")
    paths = (Path(str(distribution.locate_file(file))) for file in files)
    return sum(path.stat().st_size for path in paths if path.is_file())


def lines(images: Iterable[str] = IMAGES) -> Iterable[str]:
    """A line per image: megabytes, and what weighs most."""
    for image in images:
        found = packages(image)
        heaviest = sorted(found, key=lambda name: found[name], reverse=True)[:3]
        shares = ", ".join(f"{name} {found[name] / MEGABYTE:.0f}" for name in heaviest)
        yield f"{image:<9} {sum(found.values()) / MEGABYTE:6.0f} MB   {shares}\n"


if __name__ == "__main__":
    sys.stdout.writelines(lines())
