"""The node's run directory: the files through which ROSE's processes on a node meet.

One folder on a tmpfs (``--rundir``), shared by the containers of the node's agents. Everything in
it can be lost at any time without harm to serving: a missing permit is a closed permit, a missing
file is *unknown*. Writers replace files atomically; readers treat what is missing or unreadable as
absent and look again. The layout:

    host.sock  tap.sock           sockets of engine host and wire tap
    stop                          while it exists nothing of ROSE computes on this node
    guard.json                    highest term and pool policies last heard
    footprints/KIND.json          what engines of a kind were seen to hold of their GPU
    slots/<uid>/slot.json         the order for the slot (EnsureEngine)
    slots/<uid>/permit            rose_engines.node.permit
    slots/<uid>/engine.json       EngineFile, written by the engine host
    slots/<uid>/own/plugin.sock   control socket of the plugin inside the engine
    slots/<uid>/own/activity      what an engine on a GPU does, for those who would freeze it
    slots/<uid>/weights.json      WeightsFile, written by weight-sync
    slots/<uid>/bundles/          staged weight bundles
    slots/<uid>.busy/             the same of the slot's second engine, its permit linked
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from rose_core.unreadable import UNREADABLE
from rose_engines.node.permit import BUSY_LANE, FIRST_LANE, NAMES

T = TypeVar("T")

# Ends the folder name of a slot's second engine, which runs at the share for busy serving.
_BUSY = ".busy"
_UID = re.compile(r"^[A-Za-z0-9][-A-Za-z0-9._]{0,127}$")
# sockaddr_un.sun_path of Linux, with its final zero.
_LONGEST_SOCKET = 107


class EngineFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``engine.json``: the engine process of a slot as the host started it.

    Attributes:
        generation: the slot's generation that this engine belongs to.
        pids: processes of the engine's tree, the first one is its root.
        cgroup: folder of the engine's own cgroup, empty when there is none (signals only).
        cgroup_version: ``v1``, ``v2`` or ``signals``.
        cgroup_path: the same cgroup as the kernel names it (``/proc/PID/cgroup``), for processes
            that see the hierarchy mounted elsewhere.
        cgroup_number: inode of its folder, for processes of another cgroup namespace; 0 = unknown.
        pid_namespace: inode of the namespace that ``pids`` belong to.
        start_ticks: start time of the root process (``/proc/PID/stat``), which with its pid says
            who it is even after a restart of the host.
        url: base URL of the engine itself, on the node only.
        started_ns: since when the process has held its weights (its start, or when a dormant
            engine was activated), CLOCK_MONOTONIC nanoseconds.
        dedicated: the engine has no guard; its permit is held open by the host.
    """

    slot: str
    generation: int = 0
    pids: tuple[int, ...] = ()
    cgroup: str = ""
    cgroup_version: str = "signals"
    cgroup_path: str = ""
    cgroup_number: int = 0
    pid_namespace: int = 0
    start_ticks: int = 0
    url: str = ""
    port: int = 0
    python: str = ""
    model: str = ""
    started_ns: int = 0
    dedicated: bool = False


class WeightsFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """``weights.json``: what a slot's engine serves, as weight-sync has seen it attested.

    Attributes:
        version, digest: last attested on the live weights; empty before the first attestation.
        attested: the digest was recomputed on the live weights and equals the manifest's.
        head: newest version known to the store.
        lag: publishes between ``version`` and ``head``; None = unknown.
        error: why the head is not being served, empty when all is well.
        history: versions committed, newest last.
        engine_started_ns: ``EngineFile.started_ns`` of the process this was attested on; another
            process of the same slot has base weights until weight-sync says otherwise.
        broken: the engine reported that an undo failed; the engine host restarts it.
        fetched_bytes: size of the bundles that were pulled for this process.
    """

    version: str = ""
    digest: str = ""
    attested: bool = False
    head: str = ""
    lag: int | None = None
    error: str = ""
    history: tuple[str, ...] = ()
    engine_started_ns: int = 0
    broken: bool = False
    fetched_bytes: int = 0


@dataclass(frozen=True)
class SlotDir:
    """Paths of one slot."""

    folder: Path

    @property
    def uid(self) -> str:
        """The slot's uid."""
        return self.folder.name

    @property
    def slot(self) -> Path:
        """The order for the slot."""
        return self.folder / "slot.json"

    @property
    def permit(self) -> Path:
        """The permit's file; a busy twin knows the same memory by another name."""
        return self.folder / NAMES[BUSY_LANE if self.is_twin else FIRST_LANE]

    @property
    def is_twin(self) -> bool:
        """It is the folder of a slot's second engine."""
        return self.uid.endswith(_BUSY)

    @property
    def twin(self) -> SlotDir:
        """Where the slot's second engine lives, if it has one."""
        return SlotDir(self.folder.with_name(self.uid + _BUSY))

    @property
    def engine(self) -> Path:
        """``EngineFile``."""
        return self.folder / "engine.json"

    @property
    def plugin_socket(self) -> Path:
        """Control socket of the plugin inside the engine."""
        return self.own / "plugin.sock"

    @property
    def activity(self) -> Path:
        """What an engine on a GPU says it does (``rose_engines.node.activity``)."""
        return self.own / "activity"

    @property
    def own(self) -> Path:
        """The one folder that the engine itself may write."""
        return self.folder / "own"

    @property
    def weights(self) -> Path:
        """``WeightsFile``."""
        return self.folder / "weights.json"

    def weights_of(self, run: str) -> Path:
        """``WeightsFile`` of another run, where the engine holds adapters of several."""
        return self.folder / f"weights.{run}.json" if run else self.weights

    def every_weights(self) -> tuple[Path, ...]:
        """Each ``WeightsFile`` that lies here, of whichever run."""
        return (self.weights, *self.folder.glob("weights.*.json"))

    @property
    def bundles(self) -> Path:
        """Folder of staged weight bundles."""
        return self.folder / "bundles"

    def bundle_of(self, run: str = "") -> Path:
        """The bundle that is being fetched; this run's, where there are several."""
        return self.bundles / f"next{run and '.'}{run}"

    def create(self) -> SlotDir:
        """Make the slot's folders; returns itself.

        Raises:
            OSError: the run directory cannot be written.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.bundles.mkdir(mode=0o700, exist_ok=True)
        self.own.mkdir(mode=0o700, exist_ok=True)
        return self


@dataclass(frozen=True)
class RunDir:
    """Paths of the run directory."""

    root: Path

    @property
    def host_socket(self) -> Path:
        """GRPC of the engine host."""
        return self.root / "host.sock"

    @property
    def enforcer_bell(self) -> Path:
        """Where the engine host's enforcer learns that a permit has changed."""
        return self.root / "bell.sock"

    @property
    def tap_socket(self) -> Path:
        """Event stream of the wire tap."""
        return self.root / "tap.sock"

    @property
    def stop(self) -> Path:
        """Stop button of the node: it is pressed while this file exists."""
        return self.root / "stop"

    @property
    def guard(self) -> Path:
        """State that survives the guard's restart."""
        return self.root / "guard.json"

    @property
    def footprints(self) -> Path:
        """What engines of each kind were seen to hold of their GPU."""
        return self.root / "footprints"

    @property
    def slots(self) -> Path:
        """Folder of all slots."""
        return self.root / "slots"

    def slot(self, uid: str) -> SlotDir:
        """Paths of one slot.

        Raises:
            ValueError: the uid could leave the folder.
        """
        if _UID.match(uid) is None:
            raise ValueError(f"slot uid {uid!r} is no plain name")
        return SlotDir(self.slots / uid)

    def all_slots(self) -> tuple[SlotDir, ...]:
        """Every slot that has a folder, by uid; empty when there is no run directory yet."""
        return tuple(SlotDir(path) for path in sorted(_folders(self.slots)))

    def lent_slots(self) -> tuple[SlotDir, ...]:
        """The same without the folders of second engines, which belong to a slot beside them."""
        return tuple(slot for slot in self.all_slots() if not slot.is_twin)

    def create(self) -> RunDir:
        """Make the run directory; returns itself.

        Raises:
            OSError: it cannot be made.
            ValueError: the path is so long that no Unix socket fits below it.
        """
        longest = self.slot("u" * 36).twin.plugin_socket
        if len(str(longest)) > _LONGEST_SOCKET:
            raise ValueError(f"run directory {self.root} is too long for Unix sockets below it")
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.slots.mkdir(mode=0o700, exist_ok=True)
        return self


def slot_of(uid: str) -> str:
    """The slot that an engine belongs to, by the name of the engine's folder."""
    return uid.removesuffix(_BUSY)


def _folders(path: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for child in path.iterdir():
            if child.is_dir() and _UID.match(child.name):
                yield child


def write_json(path: Path, value: object, mode: int = 0o600) -> None:
    """Replace ``path`` by ``value`` as JSON, so that readers see the old or the new whole.

    Args:
        path: the file.
        value: what msgspec can encode.
        mode: who may read it, as far as they reach its folder.

    Raises:
        OSError: the folder is missing or full; the old file is then untouched.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, mode)
            file.write(msgspec.json.format(msgspec.json.encode(value), indent=1))
        temporary.replace(path)
    except BaseException:  # whatever it was, no half-written file stays
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path, kind: type[T]) -> T | None:
    """Read ``path`` as ``kind``; None when it is missing, unreadable or not of that kind."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNREADABLE):
        return None
