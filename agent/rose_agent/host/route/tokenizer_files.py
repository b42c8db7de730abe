"""The files of a node's model that turn text into token ids, for routers that have none.

A model's folder may be anybody's (an image volume, a puller's): a link in it that leads out of the
folder of models is not followed, so that no file of the host or of a secret goes to a router.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rose_core.wire.tokenizer_files import MOST_OF, TOKENIZER, pack


def tokenizer_frame(models: Path, model: Path) -> bytes:
    """The frame of a model (``rose_core.wire.tokenizer_files``), as its folder is now.

    Args:
        models: the node's folder of models.
        model: the model's folder below it.

    Returns:
        Empty where the folder has no tokenizer that can be given away.
    """
    root = models.resolve()
    found = {name: _content(model / name, root, most) for name, most in MOST_OF.items()}
    files = {name: content for name, content in found.items() if content is not None}
    return pack(files) if TOKENIZER in files else b""


def _content(file: Path, root: Path, most: int) -> bytes | None:
    """A file's bytes; None when it is not there, too large, or lies elsewhere."""
    try:
        place = file.resolve(strict=True)
        if not place.is_relative_to(root):
            return None
        # A pipe would keep the reader for ever.
        with os.fdopen(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                return None
            # A folder on the way may have become a link since.
            if not Path(f"/proc/self/fd/{opened.fileno()}").readlink().is_relative_to(root):
                return None
            content = opened.read(most + 1)
    except OSError:
        return None
    return content if len(content) <= most else None
