"""A bundle: one manifest and its blocks in a folder, ready for an engine to stage.

``manifest.msgpack`` and ``blocks/<64 hex digits>``. The manifest is written last, so a folder with
a manifest is complete. Engines and weight-sync agree on nothing but this folder.
"""

from __future__ import annotations

from pathlib import Path

from rose_core.delta import BlockEntry, DeltaError, Manifest, check_block
from rose_weights.disk import Disk
from rose_weights.errors import Damaged

MANIFEST = "manifest.msgpack"
BLOCKS = "blocks"


class Bundle:
    """A folder that holds, or will hold, one bundle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._disk = Disk()

    @property
    def complete(self) -> bool:
        """The manifest is there, so all blocks are."""
        return (self.folder / MANIFEST).exists()

    def manifest(self) -> Manifest:
        """Read the manifest.

        Raises:
            Damaged: missing or unreadable.
        """
        try:
            return Manifest.decode((self.folder / MANIFEST).read_bytes())
        except (OSError, DeltaError) as error:
            message = f"{self.folder} is no complete bundle: {error}"
            raise Damaged(message) from error

    def block_path(self, name: bytes) -> Path:
        """Where a block is or would be."""
        return self.folder / BLOCKS / name.hex()

    def read(self, block: BlockEntry) -> bytes:
        """A block's bytes, checked.

        Raises:
            Damaged: missing or not what its name says.
        """
        try:
            data = self.block_path(block.sha256).read_bytes()
            check_block(data, block.sha256)
        except (OSError, DeltaError) as error:
            message = f"block {block.tile} of tensor {block.tensor} in {self.folder}: {error}"
            raise Damaged(message) from error
        return data

    def put(self, name: bytes, data: bytes | memoryview) -> None:
        """Write one block.

        Raises:
            Damaged: the bytes are not what the name says.
            OSError: the disk is full or broken.
        """
        try:
            check_block(data, name)
        except DeltaError as error:
            raise Damaged(str(error)) from error
        self._disk.write(self.block_path(name), data, durable=False)

    def absent(self, manifest: Manifest) -> list[BlockEntry]:
        """Blocks of the manifest that are not in the folder intact, each once."""
        wanted = {block.sha256: block for block in manifest.blocks}
        return [block for block in wanted.values() if not self._intact(block)]

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest: the bundle is complete."""
        self._disk.write(self.folder / MANIFEST, manifest.encode(), durable=False)

    def _intact(self, block: BlockEntry) -> bool:
        try:
            self.read(block)
        except Damaged:
            return False
        return True
