"""What a trainer imports: the Publisher and the mismatch meter; see ``docs/publisher.md``.

``rose_trainer.mismatch`` needs numpy only; ``rose_trainer.publisher`` needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rose_trainer.lineage import Published
    from rose_trainer.publisher import Publisher
    from rose_trainer.quantised import BlockFp8
    from rose_trainer.sharded import ShardedPublisher
    from rose_trainer.staleness import Consumed

__all__ = ["BlockFp8", "Consumed", "Published", "Publisher", "ShardedPublisher"]

_MODULES = {
    "BlockFp8": "rose_trainer.quantised",
    "Consumed": "rose_trainer.staleness",
    "Published": "rose_trainer.lineage",
    "Publisher": "rose_trainer.publisher",
    "ShardedPublisher": "rose_trainer.sharded",
}


def __getattr__(name: str) -> object:
    """Import torch only when the Publisher is asked for."""
    if name in __all__:
        return getattr(importlib.import_module(_MODULES[name]), name)
    message = f"module 'rose_trainer' has no attribute {name!r}"
    raise AttributeError(message)
