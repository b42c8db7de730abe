"""What a trainer imports: the Publisher and the mismatch meter; see ``docs/publisher.md``.

``rose_trainer.mismatch`` needs numpy only; ``rose_trainer.publisher`` needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rose_trainer.line import Published
    from rose_trainer.publisher import Publisher

__all__ = ["Published", "Publisher"]


def __getattr__(name: str) -> object:
    """Import torch only when the Publisher is asked for."""
    if name in __all__:
        from rose_trainer import publisher  # noqa: PLC0415

        return getattr(publisher, name)
    message = f"module 'rose_trainer' has no attribute {name!r}"
    raise AttributeError(message)
