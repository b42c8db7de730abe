"""The Publisher: a trainer's weights to the store, stalling the trainer for one snapshot.

``publish`` copies the tensors into a free staging buffer and returns the version's name; a thread
compares the buffer with the state published before, encodes what changed, sends it and moves the
head. The state before is overwritten only when the new version is durable, so a failed publish is
simply tried again. With every buffer in use ``publish`` waits: the trainer never runs further ahead
than the ring is long.

States of a version here and what moves it on:

| state | next | when |
|---|---|---|
| taken | encoded | the thread has compared it with the state before |
| encoded | durable | the store has moved the head; its buffer becomes the state before |
| taken, encoded | failed | fenced, refused, or the store stayed away: the publisher stops |

The first version of an incarnation is full (``anchor=True``), so an engine can start from nothing.
An engine that loaded the same model from disk attests the digest instead and transfers nothing.
When the trainer resumed from a checkpoint that was published before, the digest says so, and the
first version is an empty delta from that one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch
from torch.utils.hooks import RemovableHandle

from rose_core.delta import faults
from rose_core.identity import WeightVersion, run_name
from rose_trainer import metrics
from rose_trainer.audience import Audience
from rose_trainer.errors import NotPublished, PublishFailed
from rose_trainer.lineage import Published, PublishJob, PublishLine
from rose_trainer.ondevice import Base, DeviceSnapshot, Place, Where, in_place
from rose_trainer.staging import Layout, Snapshot, Taken, Tensors, holds_all, pairs
from rose_trainer.staleness import Consumed
from rose_trainer.takeover import open_run
from rose_weights.messages import Description
from rose_weights.send.publishing import WeightsWriter

LOG = logging.getLogger(__name__)


class Publisher:
    """Publishes one run.

    Host memory: ``buffers + 1`` copies of the model and one version's blocks (about 1.3 bytes per
    changed element; about 0.7 of the model for a full version). A model that is compared where it
    lies takes one copy (none with ``keep_on="device"``) and ``buffers + 1`` versions' changes.

    Args:
        address: ``host:port`` of the store.
        run: the run's name, a DNS label.
        token: the store's bearer token.
        source: where ``publish`` takes tensors from when it is given none.
        buffers: versions that may be on their way at once.
        anchor: send the first version in full; without it only engines that already hold the first
            version can follow.
        on_base: send blocks coded on their base too, a quarter smaller: for receivers one version
            behind, over links so narrow that the bytes saved outweigh coding them twice
            (``make bench-weights`` states the rate).
        dtype: cast floating-point tensors to this on the way, for trainers with FP32 masters.
        compare_on: where a state is compared with the one before: ``host`` = on copies of the
            model, ``device`` = where its tensors lie, so that only changes leave it (``ondevice``;
            experimental), ``auto`` = on the device where all tensors lie on a CUDA device.
        keep_on: where the state before lies, when that comparison is on the device.
        name: who publishes, for people; the host and process by default.
        patience_seconds: how long the store may be away before the publisher gives up.

    Raises:
        PublishFailed: the store cannot be reached or refuses.
        ValueError: no run can have that name.
    """

    def __init__(
        self,
        address: str,
        run: str,
        *,
        token: str = "",
        source: Callable[[], Tensors] | None = None,
        buffers: int = 2,
        anchor: bool = True,
        on_base: bool = False,
        dtype: torch.dtype | None = None,
        compare_on: Where = "host",
        keep_on: Place = "host",
        name: str = "",
        patience_seconds: float = 1800.0,
    ) -> None:
        self._address = address
        self._token = token
        self._run = run_name(run)
        self._source = source
        self._anchor = anchor
        self._on_base = on_base
        self._dtype = dtype
        self._compare_on = compare_on
        self._keep_on = keep_on
        self._name = name or f"{socket.gethostname()}/{os.getpid()}"
        self._patience = patience_seconds
        self._buffers = buffers
        self._layout: Layout | None = None
        self._fused = self._in_place = False
        self._last: Taken | None = None
        self._free: queue.Queue[Taken] = queue.Queue()
        self._jobs: queue.Queue[PublishJob | None] = queue.Queue()
        self._changed = threading.Condition()
        self._done: dict[WeightVersion, Published] = {}
        self._failure: BaseException | None = None
        self._opened: Description | None = None
        self._next = 0
        self._thread = threading.Thread(target=self._work, name="rose-publisher", daemon=True)
        self._thread.start()
        self._await(lambda: self._opened is not None, None)
        self._audience = Audience(address, token, self._known())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close(drain=kind is None)

    @property
    def incarnation(self) -> int:
        """This publisher's incarnation of the run."""
        return self._opened.fence if self._opened else 0

    @property
    def head(self) -> WeightVersion | None:
        """The run's head as this publisher last knew it; None before the first publish."""
        with self._changed:
            if self._done:
                return next(reversed(self._done))
        known = self._opened.head if self._opened else None
        return known.version if known else None

    def publish(self, step: int, tensors: Tensors | None = None) -> WeightVersion:
        """Take a snapshot and publish it in the background.

        Args:
            step: the trainer's label for the version.
            tensors: names and tensors; None asks the ``source``.

        Returns:
            The version; ``wait`` says when it is durable.

        Raises:
            BadState: tensors that cannot be published; nothing was taken.
            PublishFailed: an earlier version could not be published.
        """
        began = time.monotonic()
        state = self._tensors(tensors)
        if self._in_place and self._next == 1:  # the first is encoded from the base itself
            self._await(lambda: bool(self._done), None)
        snapshot = self._buffer()
        try:
            snapshot.take(state, self._last)
        except BaseException:  # whatever it was, the buffer goes back into the ring
            self._free.put(snapshot)
            raise
        self._last = snapshot if self._fused else None
        faults.at("publisher.snapshot")
        version = WeightVersion(self._run, self.incarnation, self._next)
        self._next += 1
        self._audience.note_taken(version, step)
        stall = time.monotonic() - began
        metrics.STALL_SECONDS.observe(stall)
        metrics.WAITING.inc()
        self._jobs.put(PublishJob(version, step, snapshot, stall, time.monotonic()))
        return version

    def attach(self, optimizer: torch.optim.Optimizer, every: int = 1) -> RemovableHandle:
        """Publish after steps of an optimizer, comparing while its FP32 masters are cast.

        One pass over masters and BF16 state in the step's own thread takes the place of the copy
        now and the comparison later. On the host only: tensors elsewhere are copied as always.

        Args:
            optimizer: its steps are counted from 1, and the count is the version's label.
            every: publish after every so many steps.

        Returns:
            Its ``remove`` ends it.

        Raises:
            ValueError: the publisher has no ``source``.
        """
        if self._source is None:
            message = "attach() needs a publisher with a source, such as source=model.state_dict"
            raise ValueError(message)
        self._fused = True
        steps = itertools.count(1)

        def after(*_: object) -> None:
            step = next(steps)
            if step % every == 0:
                self.publish(step)

        return optimizer.register_step_post_hook(after)

    def wait(
        self,
        version: WeightVersion | int,
        timeout_seconds: float | None = None,
        *,
        quorum: float | None = None,
    ) -> Published:
        """Wait until a version is durable, or until enough engines serve it.

        Args:
            version: what ``publish`` returned, or the step it was given.
            timeout_seconds: for how long; None = for ever.
            quorum: number of engines (an integer) or share of those that report (a fraction up to
                1) that must have attested this version or a later one. No engine is no quorum.

        Raises:
            NotPublished: not durable within ``timeout_seconds``.
            NotReached: durable, but the quorum was not met within ``timeout_seconds``.
            PublishFailed: it never will be.
        """
        began = time.monotonic()
        version = self._audience.version_of(version)
        if version.incarnation != self.incarnation or not 0 <= version.sequence < self._next:
            message = f"{version} was not published by this publisher ({self._run}@..)"
            raise NotPublished(message)
        if not self._await(lambda: version in self._done, timeout_seconds):
            message = f"{version} was not durable after {timeout_seconds} s"
            raise NotPublished(message)
        if quorum is not None:
            left = None if timeout_seconds is None else timeout_seconds + began - time.monotonic()
            self._audience.wait_reached(version, quorum, left)
        return self._done[version]

    def refer(self, version: WeightVersion | int, logprobs: Sequence[float]) -> None:
        """Say what the trainer computes with a version that is durable; engines are compared.

        Args:
            version: what ``publish`` returned, or the step it was given.
            logprobs: of every token of ``rose_core.delta.probe.PROMPT`` but the first, each after
                those before it.

        Raises:
            NotPublished: not durable yet, or no longer kept.
            PublishFailed: the store cannot be reached.
        """
        self._audience.refer(self.wait(version, 0.0), logprobs)

    def consume(self, version: WeightVersion | str, *, most: int | None = None) -> Consumed:
        """Say that a trajectory is used now; counts its age in publishes.

        Args:
            version: the oldest version that sampled one of its tokens, as replies name it.
            most: largest age that is still fresh.

        Raises:
            ValueError: the text is no version.
        """
        return self._audience.consume(version, most=most)

    def close(self, *, drain: bool = True) -> None:
        """End the publisher.

        Args:
            drain: publish what has been taken first.

        Raises:
            PublishFailed: while draining, a version could not be published.
        """
        if drain and self._thread.is_alive() and self._next:
            self.wait(WeightVersion(self._run, self.incarnation, self._next - 1))
        self._jobs.put(None)
        self._thread.join(timeout=30.0)

    def _known(self) -> tuple[WeightVersion, ...]:
        """Versions that were published before this publisher."""
        return tuple(info.version for info in self._opened.versions) if self._opened else ()

    def _tensors(self, tensors: Tensors | None) -> Tensors:
        state = tensors
        if state is None:
            if self._source is None:
                message = "publish() was given no tensors and the publisher has no source"
                raise ValueError(message)
            state = self._source()
        if self._layout is None:
            streamed = not holds_all(state)
            state = list(pairs(state))
            self._layout = Layout(state, self._dtype, streamed=streamed)
            for snapshot in self._ring(state, self._layout):
                self._free.put(snapshot)
        return state

    def _ring(self, state: Sequence[tuple[str, torch.Tensor]], layout: Layout) -> list[Taken]:
        everywhere = range(self._buffers + 1)
        self._in_place = in_place(self._compare_on, (tensor for _, tensor in state))
        if not self._in_place:
            return [Snapshot(layout) for _ in everywhere]
        base = Base(self._keep_on)
        return [DeviceSnapshot(layout, base, ranked=self._on_base) for _ in everywhere]

    def _buffer(self) -> Taken:
        while True:
            self._check()
            try:
                return self._free.get(timeout=0.2)
            except queue.Empty:
                continue

    def _check(self) -> None:
        if self._failure is not None:
            longer = "no longer" if self._opened else "not"
            message = f"run {self._run!r} is {longer} published: {self._failure}"
            raise PublishFailed(message) from self._failure

    def _await(self, ready: Callable[[], bool], timeout_seconds: float | None) -> bool:
        with self._changed:
            met = self._changed.wait_for(
                lambda: ready() or self._failure is not None, timeout_seconds
            )
            if not ready():
                self._check()
            return met

    def _work(self) -> None:
        try:
            asyncio.run(self._publish_all())
        except BaseException as error:  # noqa: BLE001  # handed to the trainer's thread
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    async def _publish_all(self) -> None:
        async with WeightsWriter(self._address, token=self._token) as writer:
            opened = await open_run(writer, self._address, self._run, self._name, self._patience)
            with self._changed:
                self._opened = opened
                self._changed.notify_all()
            line = PublishLine(
                writer,
                opened,
                anchor=self._anchor,
                on_base=self._on_base,
                patience_seconds=self._patience,
            )
            # Waiting blocks this loop on purpose: it has nothing else to do, and a pool's thread
            # would keep a trainer that never calls close() from ending.
            while (job := self._jobs.get()) is not None:
                published, before = await line.publish(job)
                if before is not None:
                    self._free.put(before)
                metrics.WAITING.dec()
                with self._changed:
                    self._done[job.version] = published
                    self._changed.notify_all()
