"""The processes of one weight plane on this machine, started, killed and looked at.

Sockets are Unix sockets in one temporary folder, logs lie beside them. What an engine serves is
asked of the engine itself and of ``weights.json``; which bits a version has is known in advance
(``rose_weights.send.synthetic``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.torture.process import Process, Violation, until
from rose_agent.weightsync.decide import Engine, name_of
from rose_core.delta.digest import digest_run, total
from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import SlotKey, SlotUid
from rose_core.wire.host import EnsureEngine
from rose_core.wire.sync import EngineSpec, WeightSource
from rose_engines.errors import EngineError
from rose_engines.node.permit import Permit
from rose_engines.node.rundir import EngineFile, RunDir, SlotDir, WeightsFile, read_json, write_json
from rose_engines.tensors.safetensors import read_file
from rose_engines.weights.calls import Status
from rose_engines.weights.control import ControlClient
from rose_weights.checkpoint import write_safetensors
from rose_weights.errors import WeightsError
from rose_weights.receive.client import WeightsClient
from rose_weights.send import synthetic
from rose_weights.store.state import decode
from rose_wire.errors import WireError

_PIECE = 1 << 14

RUN = "torture"
WINDOW = 3
PERMIT_NS = 2_000_000_000

_bits_at = functools.cache(synthetic.state_at)


class Link:
    """Passes bytes between the sockets of relay and store; can be cut in a block, and healed.

    Args:
        path: where the relay connects.
        upstream: the store's socket.
    """

    def __init__(self, path: Path, upstream: Path) -> None:
        self._upstream = upstream
        self._left: int | None = None
        self._cut = threading.Event()
        self._ends: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, size: int) -> None:
        """Cut once so many more bytes have come from the store."""
        self._left = size

    @property
    def is_cut(self) -> bool:
        """Nothing passes."""
        return self._cut.is_set()

    def heal(self) -> None:
        """New connections pass again."""
        self._left = None
        self._cut.clear()

    def close(self) -> None:
        """Cut for good."""
        self._sever()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    if self.is_cut:
                        raise ConnectionRefusedError
                    far.connect(str(self._upstream))
                except OSError:
                    near.close()
                    far.close()
                    continue
                self._ends += [near, far]
                for source, target, counted in ((near, far, False), (far, near, True)):
                    threading.Thread(
                        target=self._pass, args=(source, target, counted), daemon=True
                    ).start()

    def _pass(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                if counted and self._left is not None:
                    self._left -= len(data)
                    if self._left <= 0:
                        target.sendall(data[: len(data) // 2])
                        self._sever()
                        return
                target.sendall(data)
        for end in (source, target):
            # Closing alone would not wake the thread that reads from it, and until it wakes the
            # other side is not told: a store's death would show only at gRPC's next keep-alive.
            _hang_up(end)
            end.close()

    def _sever(self) -> None:
        self._cut.set()
        ends, self._ends = self._ends, []
        for end in ends:
            _hang_up(end)


def _hang_up(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has been closed already
        end.shutdown(socket.SHUT_RDWR)


class TortureRig:
    """A store, a relay, an engine with its weight-sync, and a publisher.

    Args:
        folder: short (a socket's path may have 107 characters), empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store_address, self.relay_address = f"unix:{folder}/s", f"unix:{folder}/r"
        self.slot: SlotDir = RunDir(folder / "run").create().slot("slot-1").create()
        self.processes = {name: self._process(name, line) for name, line in self._lines().items()}
        self.step = 0
        self.asked = False
        self._known: dict[str, int] = {}
        self.gate_open = True
        self.link = Link(folder / "l", folder / "s")
        self._ending = threading.Event()
        self._permit = Permit.create(self.slot.permit)
        self._holder = threading.Thread(target=self._hold, daemon=True)

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]

    def start(self) -> None:
        """Start everything and bring the first version to the engine.

        Raises:
            Violation: it does not get there.
        """
        model = self.folder / "model"
        model.mkdir()
        bits = synthetic.first()
        write_safetensors(
            model / "model.safetensors",
            {
                spec.name: StoredTensor(spec.dtype, spec.shape, bits[spec.name])
                for spec in synthetic.SPECS
            },
        )
        self._holder.start()
        order = EnsureEngine(
            slot=SlotKey(SlotUid("slot-1"), 1),
            slot_name="torture",
            engine=EngineSpec("fake", "model", arguments={}),
            weights=WeightSource(self.relay_address, RUN),
            token="",
        )
        write_json(self.slot.slot, order)
        for name in self.processes:
            self.restart(name)
        self.publish()
        self.settle()

    def end(self) -> None:
        """End every process."""
        for process in self.processes.values():
            process.kill()
        self.link.close()
        self._ending.set()
        self._holder.join()
        self._permit.detach()

    def restart(self, name: str, fault: str = "") -> None:
        """Kill a process and start it again; returns when it can be spoken to, or is dead again.

        Raises:
            Violation: it does not come up.
        """
        process = self[name]
        process.kill()
        if name == "engine":  # as the engine host does: weights of a dead process are nobody's
            write_json(self.slot.engine, EngineFile("slot-1", started_ns=time.monotonic_ns()))
        process.start(fault)
        if name == "publisher":  # the one before may have taken its order with it
            self.asked = False
        ready: dict[str, Callable[[], bool]] = {
            "store": lambda: self._described(self.store_address) is not None,
            "relay": lambda: self._answers(self.relay_address),
            "engine": lambda: self.status() is not None,
            "publisher": lambda: process.has_printed("opened"),
        }
        check = ready.get(name, lambda: True)
        until(lambda: check() or not process.alive or process.stopped, f"{name} is up")

    def publish(self, step: int | None = None) -> None:
        """Ask the publisher for the next step, or for this one."""
        self.step = self.step + 1 if step is None else step
        self["publisher"].write(str(self.step))
        self.asked = True

    def durable(self) -> None:
        """Wait until the store has the step that was asked for.

        Raises:
            Violation: it does not get there.
        """
        step, lines = self.step, self["publisher"].lines
        until(
            lambda: any(line.get("step") == step and "durable" in line for line in lines),
            f"step {step} is durable",
        )

    def settle(self) -> None:
        """Wait until the engine serves the newest step, attested, bit for bit.

        Raises:
            Violation: it does not get there, or its weights are not that version's.
        """
        if not self.asked:
            self["publisher"].write(str(self.step))
            self.asked = True
        try:
            until(self._there, f"step {self.step} is attested")
        except Violation as violation:
            raise Violation(f"{violation}; {self._where()}") from None
        self.look()
        head = self._described(self.store_address)
        if head is None or head[2] != self.weights.digest:
            raise Violation(f"the engine attests {self.weights.digest}, the head is {head}")

    def _where(self) -> str:
        """How far the newest step has come, for whoever must find out why it went no further."""
        dead = [f"{one.name} ended with {one.code}" for one in self.processes.values()]
        states = "; ".join(one for one in dead if not one.endswith("None"))
        lines = self["publisher"].lines
        heads = {
            name: self._described(address)
            for name, address in (("store", self.store_address), ("relay", self.relay_address))
        }
        return (
            f"{self.weights}; {states or 'all run'}; the publisher said {lines[-2:]}; heads {heads}"
        )

    def look(self) -> str:
        """Check what is served right now; returns its label, empty when nothing is.

        Raises:
            Violation: mixed weights, weights of another version than the label says, or
                ``weights.json`` vouches for what is not there.
        """
        status = self.status()
        if status is None:
            return ""
        if "--ranks" in self["engine"].command:
            return self._attested(status)
        path = self.folder / "live.safetensors"
        exported = self._ask(lambda client: client.export(path))
        after = self.status()
        if exported is None or after is None or after.version != status.version:
            return self.look() if exported is not None else ""
        live = {name: parts[2] for name, parts in read_file(path)}
        step = next((s for s in range(self.step, -1, -1) if _same(live, s)), None)
        if step is None:
            raise Violation(f"the engine serves weights of no version as {status.version}")
        known = self._steps().get(status.version, 0 if status.version == "base" else None)
        if known is not None and not _same(live, known):
            raise Violation(f"{status.version} is step {known}, the weights are step {step}")
        # Either may be a moment ahead of the other while a commit is under way, not for long.
        until(self._agrees, f"weights.json ({self.weights}) agrees with the engine ({status})")
        return status.version

    def _attested(self, status: Status) -> str:
        """What several ranks serve: no file holds it, the digests of all of them say it."""
        found = self._ask(lambda client: client.attest())
        known = self._steps().get(status.version, 0 if status.version == "base" else None)
        if found is None or known is None or found.version != status.version:
            return ""
        wanted = total(digest_run(name, 0, bits) for name, bits in _bits_at(known).items())
        if found.digest != str(wanted):
            raise Violation(f"{found.version} has digest {found.digest} instead of {wanted}")
        return status.version

    @property
    def weights(self) -> WeightsFile:
        """What weight-sync says."""
        return read_json(self.slot.weights, WeightsFile) or WeightsFile()

    def status(self) -> Status | None:
        """What the engine says; None while it does not answer."""
        found: Status | None = self._ask(lambda client: client.status())
        return found

    def newest(self) -> set[str]:
        """Labels of the step that is being published: it may be live already."""
        lines = self["publisher"].lines
        return {one["taken"] for one in lines if one.get("step") == self.step and "taken" in one}

    def same_step(self, label: str, other: str) -> bool:
        """Both name one step: a publisher that starts again publishes its last one anew."""
        steps = self._steps()
        return label in steps and steps[label] == steps.get(other)

    def blocks(self, root: str) -> Iterator[Path]:
        """Files of the head's blocks under the folder of the store or the relay."""
        names = {block.hex() for block in self._head_blocks()}
        return (path for path in (self.folder / root).rglob("*") if path.name in names)

    def run_folder(self) -> Path:
        """The run at the store."""
        return self.folder / "store" / "runs" / RUN

    def head_manifest(self) -> Path:
        """The file of the newest version's manifest at the store."""
        kept = decode((self.run_folder() / "state.json").read_bytes(), "state").versions[-1]
        return self.run_folder() / "manifests" / kept.manifest

    def _agrees(self) -> bool:
        """What ``weights.json`` vouches for is what this process of the engine serves."""
        file, status = self.weights, self.status()
        vouched = file.attested and file.engine_started_ns == self._started()
        if status is None or not vouched:
            return True
        live = name_of(Engine(status.version, status.digest), RUN)
        return (file.version, file.digest) == (live, status.digest) or not self["weight-sync"].alive

    def _there(self) -> bool:
        file = self.weights
        # A publisher that started again publishes its last step anew: the label before would do
        # for the bits, but the next case would begin while the new one is still on its way.
        return file.attested and file.version in self.newest() and file.version == file.head

    def _steps(self) -> dict[str, int]:
        """Label -> step of every version that somebody has named so far."""
        found = self._known
        ever = tuple(self["publisher"].ever)
        found |= {line["taken"]: line["step"] for line in ever if "taken" in line}
        return found

    def _started(self) -> int:
        record = read_json(self.slot.engine, EngineFile)
        return record.started_ns if record is not None else 0

    def _ask(self, call: Callable[[ControlClient], Any]) -> Any:  # noqa: ANN401  # the call's answer
        async def ask() -> Any:  # noqa: ANN401
            async with asyncio.timeout(5):
                async with await ControlClient.connect(self.slot.plugin_socket) as client:
                    return await call(client)

        try:
            return asyncio.run(ask())
        except (EngineError, TimeoutError):
            return None

    def _described(self, address: str) -> tuple[str, int | None, str] | None:
        """Version, step and digest of the head; empty words before the first publish."""

        async def ask() -> tuple[str, int | None, str]:
            async with asyncio.timeout(5), WeightsClient(address) as client:
                runs = (await client.describe()).runs
                if RUN not in runs:
                    return "", None, ""
                head = (await client.describe(RUN)).head
                return (str(head.version), head.step, head.digest) if head else ("", None, "")

        try:
            return asyncio.run(ask())
        except (WeightsError, WireError, TimeoutError):
            return None

    def _answers(self, address: str) -> bool:
        return self._described(address) is not None or not self["store"].alive

    def _head_blocks(self) -> list[bytes]:
        async def ask() -> list[bytes]:
            async with WeightsClient(self.store_address) as client:
                described = await client.describe(RUN)
                before = described.versions[-2]
                plan, _ = await client.plan(RUN, have=before.version, digest=before.digest)
                return [block.sha256 for block in plan.blocks]

        return asyncio.run(ask())

    def _hold(self) -> None:
        while not self._ending.wait(0.05):
            if self.gate_open:
                self._permit.extend(time.monotonic_ns() + PERMIT_NS)
        self._permit.close_now()

    def close_gate(self) -> None:
        """Forbid computing at once."""
        self.gate_open = False
        time.sleep(0.1)  # the holder may be extending right now
        self._permit.close_now()

    def _process(self, name: str, line: str) -> Process:
        return Process(name, line.split(), self.folder / f"{name}.log")

    def _lines(self) -> dict[str, str]:
        here = self.folder
        rose = "rose_cli.main"
        quiet = "--http-port 0 --log-level WARNING"
        slot = self.slot
        return {
            "store": f"{rose} weights serve --root {here}/store --address {self.store_address} "
            f"--window {WINDOW} {quiet}",
            "relay": f"{rose} weights relay --root {here}/relay --address {self.relay_address} "
            f"--upstream unix:{here}/l {quiet}",
            "engine": f"rose_engines.fake --permit {slot.permit} --model {here}/model "
            f"--plugin-socket {slot.plugin_socket}",
            "weight-sync": f"{rose} weight-sync --rundir {here}/run --attest-seconds 2 {quiet}",
            "publisher": f"rose_trainer.synthetic --address {self.store_address} --run {RUN} "
            "--on-base",
        }


def _same(live: dict[str, Any], step: int) -> bool:
    return all(np.array_equal(live[name], bits) for name, bits in _bits_at(step).items())


def encode(value: object) -> bytes:
    """JSON for a report."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1)
