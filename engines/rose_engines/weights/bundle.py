"""Reading a bundle that weight-sync has put into a folder: ``manifest.msgpack`` and ``blocks/``.

Next step: ``rose_engines.weights.staging`` decodes what is read here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rose_core.delta.errors import ManifestError
from rose_core.delta.manifest import BlockEntry, Manifest
from rose_engines.errors import CommitRefused


def read_manifest(bundle: Path) -> Manifest:
    """The manifest of a bundle folder.

    Raises:
        CommitRefused: ``Corrupt``: missing, damaged or of another format.
    """
    try:
        return Manifest.decode((bundle / "manifest.msgpack").read_bytes())
    except OSError as error:
        raise CommitRefused("Corrupt", f"no manifest in {bundle}: {error}") from error
    except ManifestError as error:
        raise CommitRefused("Corrupt", f"manifest of {bundle}: {error}") from error


class BlockFolder:
    """The blocks of a bundle, read by their names inside an open folder: a path costs as much.

    Args:
        descriptor: of the folder; None = it is not there.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[BlockFolder]:
        """The folder, for a while; a bundle without changes may have none."""
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            yield cls(None)
            return
        try:
            yield cls(descriptor)
        finally:
            os.close(descriptor)

    def read(self, block: BlockEntry) -> bytes:
        """A block's bytes, unchecked.

        Raises:
            OSError: it is not there.
        """
        if self._descriptor is None:
            raise FileNotFoundError(block.sha256.hex())
        file = os.open(block.sha256.hex(), os.O_RDONLY, dir_fd=self._descriptor)
        try:
            return os.read(file, block.size + 1)  # one more: what is too long shows in its hash
        finally:
            os.close(file)
