"""A decode loop in a process of its own: ``python -m bench.gpu.worker``, told by lines on stdin.

    run | pause      compute, or wait between two steps
    take             print the steps since the last ``take``: [[end_ns, length_ns], ...]
    info             print what is seen of the GPU
    hold BYTES       take this much memory, filled from host memory; print the seconds
    drop             give it back; print the seconds
    fault            read what is not there, as a broken kernel does; the process does not survive
    quit

A step reads every weight once, as decoding does: matrices times a narrow batch, then a wait for the
GPU. Times are CLOCK_MONOTONIC of the GPU's own events, so a step that ends while this process is
frozen has its true end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from rose_agent.devices.mps import asking
from rose_engines.fake.device import connect

_GIB = 1 << 30
_YIELD_SECONDS = 0.0002


class Loop(Protocol):
    """What is computed, and where."""

    def step(self) -> None:
        """One step; returns when the GPU has done it."""

    def take(self) -> list[tuple[int, int]]:
        """End and length of the steps since the last call, nanoseconds."""

    def info(self) -> dict[str, Any]:
        """What is seen of the GPU."""

    def hold(self, size: int) -> None:
        """Take memory and fill it."""

    def drop(self) -> None:
        """Give it back."""

    def fault(self) -> None:
        """Crash on the GPU."""


class FakeLoop:
    """Sleeps; sees what ``rose_engines.fake.device`` lets a process see."""

    def __init__(self, layers: int, _width: int, batch: int) -> None:
        self._seconds = 0.0005 * layers * (1 + batch / 64)
        self._steps: list[tuple[int, int]] = []
        self._device = connect(132, 80 * _GIB, os.environ)

    def step(self) -> None:
        """Sleep."""
        began = time.monotonic_ns()
        time.sleep(self._seconds)
        now = time.monotonic_ns()
        self._steps.append((now, now - began))

    def take(self) -> list[tuple[int, int]]:
        """Give the steps since the last call, by the host's clock, and forget them."""
        taken, self._steps = self._steps, []
        return taken

    def info(self) -> dict[str, Any]:
        """What the stand-in shows."""
        device = self._device
        return {"multiprocessors": device.multiprocessors, "memory": device.memory_bytes}

    def hold(self, size: int) -> None:
        """Nothing to hold."""

    def drop(self) -> None:
        """Nothing to give back."""

    def fault(self) -> None:
        """Tell the stand-in for the daemon, and end."""
        control = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")) / "control"
        if control.exists():
            asking.send(control, "fake_fault")
        os._exit(1)


class TorchLoop:
    """Matrices on the GPU."""

    def __init__(self, layers: int, width: int, batch: int) -> None:
        torch: Any = importlib.import_module("torch")  # the fake needs none
        self._torch = torch
        kind = torch.bfloat16
        made = [torch.randn(width, width, device="cuda", dtype=kind) for _ in range(layers)]
        self._weights = made
        self._state = torch.randn(batch, width, device="cuda", dtype=kind)
        self._held: Any = None
        self._chunk: Any = None
        self._event = torch.cuda.Event
        self._events: list[tuple[Any, Any]] = []
        self._zero = self._event(enable_timing=True)
        torch.cuda.synchronize()
        self._zero.record()
        self._zero.synchronize()
        self._zero_ns = time.monotonic_ns()

    def step(self) -> None:
        """Every layer once."""
        torch = self._torch
        first, last = (self._event(enable_timing=True) for _ in range(2))
        first.record()
        state = self._state
        for weight in self._weights:
            state = torch.nn.functional.normalize(state @ weight, dim=1)
        last.record()
        last.synchronize()
        self._events.append((first, last))

    def take(self) -> list[tuple[int, int]]:
        """Of the GPU's clock, set to the host's at the start."""
        taken, self._events = self._events, []
        return [
            (
                self._zero_ns + int(self._zero.elapsed_time(last) * 1e6),
                int(first.elapsed_time(last) * 1e6),
            )
            for first, last in taken
        ]

    def info(self) -> dict[str, Any]:
        """What CUDA shows this process."""
        cuda = self._torch.cuda
        count = cuda.get_device_properties(0).multi_processor_count
        return {"multiprocessors": count, "memory": cuda.mem_get_info()[1]}

    def hold(self, size: int) -> None:
        """As weights that come from pinned host memory."""
        torch = self._torch
        if self._chunk is None:
            self._chunk = torch.empty(min(size, _GIB), dtype=torch.uint8, pin_memory=True)
        chunk = self._chunk
        self._held = torch.empty(size, dtype=torch.uint8, device="cuda")
        for start in range(0, size, chunk.numel()):
            part = self._held[start : start + chunk.numel()]
            part.copy_(chunk[: part.numel()], non_blocking=True)
        torch.cuda.synchronize()

    def drop(self) -> None:
        """To the driver, not only to torch's allocator."""
        self._held = None
        self._torch.cuda.empty_cache()
        self._torch.cuda.synchronize()

    def fault(self) -> None:
        """An index far outside trips an assertion on the GPU."""
        torch = self._torch
        where = torch.tensor([1 << 40], device="cuda")
        torch.zeros(1, device="cuda")[where].sum().item()


def _print(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Until ``quit``."""
    parser = argparse.ArgumentParser(prog="bench.gpu.worker")
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    loop: Loop = (FakeLoop if options.fake else TorchLoop)(
        options.layers, options.width, options.batch
    )
    loop.step()
    loop.take()
    lock, running, ended = threading.Lock(), threading.Event(), threading.Event()
    asked = threading.Event()

    def obey() -> None:
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            asked.set()  # the loop would else take the lock again before we get it
            _obey(line.split(), loop, lock, running)
            asked.clear()
        ended.set()
        running.set()

    threading.Thread(target=obey, daemon=True).start()
    _print({"ready": True, **loop.info()})
    while not ended.is_set():
        running.wait()
        if asked.is_set():
            time.sleep(_YIELD_SECONDS)
            continue
        with lock:
            if running.is_set() and not ended.is_set():
                loop.step()
    return 0


def _obey(command: list[str], loop: Loop, lock: threading.Lock, running: threading.Event) -> None:
    if command[0] in {"run", "pause"}:
        running.set() if command[0] == "run" else running.clear()
        return
    with lock:
        began = time.monotonic()
        answer: object = None
        if command[0] == "take":
            answer = loop.take()
        elif command[0] == "info":
            answer = loop.info()
        elif command[0] == "hold":
            loop.hold(int(command[1]))
        elif command[0] == "drop":
            loop.drop()
        elif command[0] == "fault":
            loop.fault()
        _print(time.monotonic() - began if answer is None else answer)


if __name__ == "__main__":
    sys.exit(main())
