"""Keeps what engines were seen to hold, by kind, in the node's run directory.

Two engines are of one kind when version, class, model shape, GPU and arguments are the same. The
record outlives the engine host and the slots; it is lost with the node's run directory, and then
measured anew. Next step: ``rose_core.devices.footprint`` judges, ``sharing`` asks.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rose_core.devices.footprint import Footprint
from rose_core.wire.sync import EngineSpec
from rose_engines.node.rundir import read_json, write_json

_log = logging.getLogger(__name__)


def kind_of(spec: EngineSpec, config: bytes, version: str, gpu: str) -> str:
    """Name under which an engine's footprint is remembered.

    Args:
        spec: the engine.
        config: the model's ``config.json``.
        version: of the engine's program.
        gpu: product name of its GPU.
    """
    parts = (
        spec.engine_class,
        version,
        gpu,
        hashlib.sha256(config).hexdigest(),
        *(f"{name}={value}" for name, value in sorted(spec.arguments.items())),
        *(
            str(figure)
            for figure in (spec.context_tokens, spec.kv_tokens, spec.max_running, spec.ranks)
        ),
        msgspec.json.encode(spec.sharing).decode(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def engine_version(python: Path) -> str:
    """Version of the SGLang that this Python has; its path where it does not say."""
    for found in sorted(python.parent.parent.glob("lib/python3*/site-packages/sglang-*.dist-info")):
        return found.name.removesuffix(".dist-info")
    return str(python)


@dataclass
class Footprints:
    """Footprints by kind.

    Attributes:
        folder: where they are kept; None = in memory only.
    """

    folder: Path | None = None
    _known: dict[str, Footprint] = field(default_factory=dict)

    def find(self, kind: str) -> Footprint | None:
        """What is remembered of a kind; None = it was never measured here."""
        if kind not in self._known and self.folder is not None:
            stored = read_json(self.folder / f"{kind}.json", Footprint)
            if stored is not None:
                self._known[kind] = stored
        return self._known.get(kind)

    def remember(self, kind: str, footprint: Footprint) -> None:
        """Keep it from now on."""
        if self.find(kind) == footprint:
            return
        self._known[kind] = footprint
        if self.folder is None:
            return
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            write_json(self.folder / f"{kind}.json", footprint)
        except OSError as error:  # measured anew after the next start of the host
            _log.warning("footprint %s is not kept: %s", kind, error)
