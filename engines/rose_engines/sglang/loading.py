"""When SGLang loads patched checkpoints by itself instead of having elements written in place.

Only where the platform says so (``FALLBACK_VARIABLE``): an engine whose layout is refused ends
otherwise, and its reason is on stderr. Next step: ``rose_engines.weights.reload``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rose_engines.errors import UnsupportedEngine
from rose_engines.sglang.arguments import FALLBACK_VARIABLE
from rose_engines.sglang.ranks import read_live
from rose_engines.tensors.canonical import LiveTensor
from rose_engines.weights.reload import ReloadSession
from rose_engines.weights.stager import OwnProcess

log = logging.getLogger(__name__)

DISK, ALWAYS = "disk", "disk-always"


def by_layout(scheduler: Any, folder: Path, fallback: str) -> dict[str, LiveTensor]:  # noqa: ANN401
    """The weights in place.

    Raises:
        UnsupportedEngine: the layout cannot be learnt, or nobody wants it to be.
    """
    if fallback == ALWAYS:
        raise UnsupportedEngine(f"{FALLBACK_VARIABLE}={ALWAYS}")
    return read_live(scheduler, folder)


def check(scheduler: Any, fallback: str, refused: UnsupportedEngine) -> None:  # noqa: ANN401
    """Whether this engine may load patched checkpoints.

    Raises:
        UnsupportedEngine: it may or can not; ``refused`` is why it would have to.
    """
    if fallback not in {DISK, ALWAYS}:
        hint = f"{FALLBACK_VARIABLE}={DISK} in the engine host's environment lets it load copies"
        raise UnsupportedEngine(f"{refused}; {hint}") from refused
    if int(scheduler.tp_size) > 1:
        message = f"{refused}; an engine over several ranks does not load patched checkpoints"
        raise UnsupportedEngine(message) from refused
    updater = getattr(scheduler, "weight_updater", None)
    if not callable(getattr(updater, "update_weights_from_disk", None)):
        message = f"{refused}; this SGLang has no update_weights_from_disk to fall back to"
        raise UnsupportedEngine(message) from refused
    log.warning("rose: weights are loaded from patched checkpoints: %s", refused)


def session(
    scheduler: Any,  # noqa: ANN401
    folder: Path,
    version: str,
    set_label: Callable[[str], int],
    wake: Callable[[], None],
) -> ReloadSession:
    """The weight session of such an engine."""
    model = Path(scheduler.server_args.model_path)
    copies = folder / "reload"
    return ReloadSession(
        model,
        copies,
        lambda path: load(scheduler, path),
        version=version,
        set_label=set_label,
        wake=wake,
        stager=OwnProcess,
    )


def load(scheduler: Any, path: Path) -> str | None:  # noqa: ANN401
    """In the engine thread, between two iterations; why it failed, None = loaded.

    The prefix cache stays: requests get keys of the new version (``plugin``).
    """
    from sglang.srt.managers.io_struct import (  # noqa: PLC0415  # only inside engines
        UpdateWeightFromDiskReqInput,
    )

    order = UpdateWeightFromDiskReqInput(
        model_path=str(path), load_format="safetensors", flush_cache=False
    )
    try:
        answer = scheduler.weight_updater.update_weights_from_disk(order)
    except Exception as error:  # whatever the loader raises, the version before must come back
        log.exception("rose: %s was not loaded", path)
        return f"SGLang did not load {path}: {type(error).__name__}: {error}"
    return None if answer.success else f"SGLang did not load {path}: {answer.message}"
