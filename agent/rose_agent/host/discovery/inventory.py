"""Which models this node has: what leases may name and engines may load.

The folder is the platform's: filled by hand, by a puller, or by image volumes. It is looked at
again and again, because a model that is brought later needs no restart. A model is a folder with a
``config.json`` and at least one ``*.safetensors``.

``digest`` tells two models of one name apart: SHA-256 over the names and sizes of its files, its
small files, and the headers of its weights. The weights themselves are not read; what an engine
computes with is attested elsewhere (``rose_core.delta``).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

from rose_core.api.names import MODEL_NAME
from rose_core.wire.sync import MOST_MODELS, NodeModel

_log = logging.getLogger(__name__)

LOOK_SECONDS = 30.0
_MOST_FILES = 4096
_SMALL_BYTES = 1 << 20
# The format's own limit of a header.
_MOST_HEADER = 100_000_000
_NAME = re.compile(MODEL_NAME)
_DIGEST_CHARACTERS = 16


class Inventory:
    """Looks at the folder, and remembers what has not changed since.

    Args:
        models: the node's folder of models.

    Attributes:
        models: what lies there; None while the folder cannot be read, or nobody has looked.
    """

    def __init__(self, models: Path) -> None:
        self._models = models
        self._known: dict[Path, tuple[tuple[tuple[str, int, int], ...], NodeModel]] = {}
        self.models: tuple[NodeModel, ...] | None = None

    async def keep(self, seen: Callable[[], None] = lambda: None) -> None:
        """Look now and then, until cancelled; ``seen`` is called after each look."""
        while True:
            await self.refresh()
            seen()
            await asyncio.sleep(LOOK_SECONDS)

    async def refresh(self) -> None:
        """Read the folder once, in a thread: it may be on a slow disk."""
        self.models = await asyncio.to_thread(self._look)

    def _look(self) -> tuple[NodeModel, ...] | None:
        found = []
        try:
            folders = sorted(self._models.iterdir())
        except OSError as error:
            _log.warning("models: %s", error)
            return None
        for folder in folders:
            if not _NAME.match(folder.name) or not (folder / "config.json").is_file():
                continue
            try:
                model = self._model(folder)
            except OSError as error:  # being replaced just now, or not for us
                _log.warning("model %s: %s", folder.name, error)
                continue
            if model is not None:
                found.append(model)
            if len(found) == MOST_MODELS:
                break
        kept = {self._models / one.name for one in found}
        self._known = {folder: known for folder, known in self._known.items() if folder in kept}
        return tuple(found)

    def _model(self, folder: Path) -> NodeModel | None:
        files = sorted(path for path in folder.iterdir() if path.is_file())[:_MOST_FILES]
        if not any(path.suffix == ".safetensors" for path in files):
            return None
        state = tuple((p.name, (s := p.stat()).st_size, s.st_mtime_ns) for p in files)
        known = self._known.get(folder)
        if known is not None and known[0] == state:
            return known[1]
        size = sum(one[1] for one in state)
        model = NodeModel(folder.name, size, digest_of(files))
        self._known[folder] = state, model
        return model


def digest_of(files: list[Path]) -> str:
    """The model's digest, hexadecimal; see the module.

    Raises:
        OSError: a file cannot be read.
    """
    total = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        # A file may be called by any bytes.
        total.update(os.fsencode(path.name) + f"\0{size}\0".encode())
        if path.suffix == ".safetensors":
            total.update(_header(path))
        elif size <= _SMALL_BYTES:
            total.update(path.read_bytes())
    return total.hexdigest()[:_DIGEST_CHARACTERS]


def _header(path: Path) -> bytes:
    """Names, types and shapes of the tensors; nothing of a file that is none."""
    with path.open("rb") as file:
        begin = file.read(8)
        if len(begin) < struct.calcsize("<Q"):
            return begin
        (length,) = struct.unpack("<Q", begin)
        return begin + file.read(length) if length <= _MOST_HEADER else begin
