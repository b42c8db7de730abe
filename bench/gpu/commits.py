"""Weights on a GPU, in the shapes of real models: commit, digest, memory saver.

One per cent of every tensor changes. Three ways to put it in: as ROSE does today (per tensor: copy
positions and bits, scatter, wait, copy again and compare), one scatter over one arena from pinned
memory, and one from memory that lies on the device already. Qwen3-8B has 399 tensors and
Qwen3-30B-A3B 18,867, so a pause that grows with their number shows. torch and numpy are all it
needs; the digest is ROSE's own and needs its packages. Next step: ``aims``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.gpu.beside import Measured, Nvml, Scale

MODELS = ("8B", "30B-A3B")
_SAVED = 430  # matrices of 4096 x 4096: 14 GB
_LOOK_SECONDS = 0.2  # until NVML's list of processes tells what has changed


def shapes(model: str, *, tiny: bool) -> Iterator[tuple[int, ...]]:
    """Tensors of a checkpoint."""
    if model == "8B":
        hidden, inner, layers, queries, keys, experts = 4096, 12288, 36, 4096, 1024, 0
    else:
        hidden, inner, layers, queries, keys, experts = 2048, 768, 48, 4096, 512, 128
    vocabulary = 151936
    if tiny:
        hidden, inner, layers, queries, keys, vocabulary = 64, 32, 2, 64, 32, 256
        experts = min(experts, 4)
    yield from ((vocabulary, hidden), (vocabulary, hidden), (hidden,))
    for _ in range(layers):
        yield from ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries))
        yield from ((hidden,), (hidden,), (128,), (128,))
        if experts:
            yield (experts, hidden)
        for _ in range(experts or 1):
            yield from ((inner, hidden), (inner, hidden), (hidden, inner))


class State:
    """All tensors of a model as pieces of one arena, and the changes to it."""

    def __init__(self, scale: Scale, model: str) -> None:
        self.torch: Any = importlib.import_module("torch")
        numpy: Any = importlib.import_module("numpy")
        self._gpu = scale.gpu
        self.device = scale.device
        sizes = [int(numpy.prod(size)) for size in shapes(model, tiny=not scale.gpu)]
        self.arena = self.torch.zeros(sum(sizes), dtype=self.torch.int16, device=scale.device)
        self.flats = list(self.arena.split(sizes))
        some = numpy.random.default_rng(1)
        self.where = [numpy.unique(some.integers(0, n, max(1, n // 100))) for n in sizes]
        low = 1 << 15
        self.bits = [some.integers(-low, low, len(w)).astype(numpy.int16) for w in self.where]
        first = numpy.cumsum([0, *sizes[:-1]])
        places = numpy.concatenate([w + o for w, o in zip(self.where, first, strict=True)])
        self.places = self._pinned(places)
        self.values = self._pinned(numpy.concatenate(self.bits))
        self.bytes = 2 * sum(sizes)

    def _pinned(self, values: Any) -> Any:  # noqa: ANN401
        made = self.torch.from_numpy(values)
        return made.pin_memory() if self._gpu else made

    def wait(self) -> None:
        """Until the device is done."""
        if self._gpu:
            self.torch.cuda.synchronize()

    def as_today(self) -> int:
        """Tensor by tensor; returns how many are wrong."""
        torch, wrong = self.torch, 0
        for flat, w, b in zip(self.flats, self.where, self.bits, strict=True):
            flat[torch.from_numpy(w).to(self.device)] = torch.from_numpy(b).to(self.device)
            self.wait()
            read = flat[torch.from_numpy(w).to(self.device)]
            wrong += not torch.equal(read, torch.from_numpy(b).to(self.device))
        return wrong

    def one_scatter(self, places: Any, values: Any) -> int:  # noqa: ANN401
        """Over the arena; returns 1 when something is wrong."""
        w = places.to(self.device, non_blocking=True)
        b = values.to(self.device, non_blocking=True)
        self.arena[w] = b
        return int(not bool((self.arena[w] == b).all()))

    def took(self, what: Callable[[], int], rounds: int) -> tuple[float, int]:
        """Median milliseconds, and what was wrong at most."""
        took, wrong = [], 0
        for _ in range(rounds):
            self.arena.zero_()
            self.wait()
            began = time.perf_counter()
            wrong = max(wrong, what())
            self.wait()
            took.append((time.perf_counter() - began) * 1e3)
        return statistics.median(took), wrong


def commit(scale: Scale) -> Measured:
    """The pause of a commit, three ways."""
    found: Measured = []
    for model in MODELS:
        state = State(scale, model)
        rounds = 3 if scale.gpu else 1
        today, wrong = state.took(state.as_today, rounds)
        scattered, wrong_too = state.took(
            lambda s=state: s.one_scatter(s.places, s.values),  # type: ignore[misc]
            rounds,
        )
        there = state.places.to(scale.device), state.values.to(scale.device)
        staged, wrong_as_well = state.took(
            lambda s=state, t=there: s.one_scatter(*t),  # type: ignore[misc]
            rounds,
        )
        place = f"commit.{model}"
        found += [
            (f"{place}.tensors", len(state.flats), "count"),
            (f"{place}.changes", len(state.places), "count"),
            (f"{place}.as_today", today, "ms"),
            (f"{place}.one_scatter", scattered, "ms"),
            (f"{place}.staged", staged, "ms"),
            (f"{place}.wrong", wrong + wrong_too + wrong_as_well, "tensors"),
        ]
    return found


def digest(scale: Scale) -> Measured:
    """The digest of a whole state by ROSE's own code, and the memory that it takes beside.

    Raises:
        OSError: ROSE's packages are not here.
    """
    try:
        digests: Any = importlib.import_module("rose_engines.ondevice.device_digest")
    except ImportError as error:
        raise OSError(f"the digest is ROSE's own: {error}") from error
    found: Measured = []
    for model in MODELS:
        state = State(scale, model)
        some = state.flats[: 60 if model == "8B" else 2000]
        cuda = state.torch.cuda
        before = 0
        if scale.gpu:
            cuda.reset_peak_memory_stats()
            before = int(cuda.memory_allocated())
        began = time.perf_counter()
        for number, flat in enumerate(some):
            digests.digest_run(f"t{number}", 0, flat)
        state.wait()
        took = time.perf_counter() - began
        done = 2 * sum(flat.numel() for flat in some)
        peak = int(cuda.max_memory_allocated()) - before if scale.gpu else 0
        found += [
            (f"digest.{model}.whole", took * state.bytes / done, "s"),
            (f"digest.{model}.rate", done / took / 1e9, "GB/s"),
            (f"digest.{model}.beside", peak / 2**30, "GiB"),
        ]
    return found


def saver(scale: Scale) -> Measured:
    """The memory saver gives weights and KV back and takes them again; graphs must still be right.

    Raises:
        OSError: it is not installed, or failed; says how.
    """
    run = [sys.executable, "-m", "bench.gpu.commits", scale.device]
    if scale.gpu:
        start = "import torch_memory_saver as t, subprocess, sys\n"
        start += f"with t.configure_subprocess():\n    sys.exit(subprocess.call({run!r}))"
        run = [sys.executable, "-c", start]
    done = subprocess.run(run, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.strip()[-400:] or "the memory saver's process failed")
    cycles = json.loads(done.stdout.strip().splitlines()[-1])
    both = [cycle["pause"] + cycle["resume"] for cycle in cycles]
    return [
        ("saver.pause_resume_p50", statistics.median(both), "s"),
        ("saver.refill_p50", statistics.median(cycle["refill"] for cycle in cycles), "s"),
        ("saver.kept_share", max(cycle["kept_share"] for cycle in cycles), "share"),
        ("saver.changed", sum(not cycle["same"] for cycle in cycles), "results"),
    ]


class HostSaver:
    """The memory saver's interface without a GPU: pages go, addresses stay.

    It is how an engine on a CPU becomes dormant (``rose_engines.weights.memory``).
    """

    def __init__(self) -> None:
        self._tensors: dict[str, list[Any]] = {}

    @contextlib.contextmanager
    def region(self, tag: str) -> Iterator[None]:
        """What is made inside belongs to the tag."""
        modes: Any = importlib.import_module("torch.utils._python_dispatch")
        torch: Any = importlib.import_module("torch")
        made = self._tensors.setdefault(tag, [])

        class Collecting(modes.TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(
                self,
                func: Callable[..., Any],
                types: object,
                args: tuple[Any, ...] = (),
                kwargs: dict[str, Any] | None = None,
            ) -> Any:  # noqa: ANN401
                found = func(*args, **(kwargs or {}))
                if isinstance(found, torch.Tensor):
                    made.append(found)
                return found

        with Collecting():
            yield

    def pause(self, tag: str) -> None:
        """Give its memory back."""
        drop_pages: Any = importlib.import_module("rose_engines.weights.memory").drop_pages
        for tensor in self._tensors[tag]:
            storage = tensor.untyped_storage()
            drop_pages(storage.data_ptr(), storage.nbytes())

    def resume(self, tag: str) -> None:
        """Take it again; what it held is gone."""
        for tensor in self._tensors[tag]:
            tensor.zero_()


def _cycles(device: str) -> list[dict[str, float | bool]]:
    """Inside the saver's own process: five times let go, take back, fill, replay."""
    torch: Any = importlib.import_module("torch")
    gpu = device == "cuda"
    memory: Any = (
        importlib.import_module("torch_memory_saver").torch_memory_saver if gpu else HostSaver()
    )
    many, width, cached = (_SAVED, 4096, 10 << 30) if gpu else (8, 512, 32 << 20)
    with memory.region(tag="weights"):
        kind = torch.bfloat16
        weights = [torch.randn(width, width, device=device, dtype=kind) for _ in range(many)]
    with memory.region(tag="kv_cache"):
        cache = torch.ones(cached, dtype=torch.uint8, device=device)
    claimed = cached + 2 * many * width * width
    x = torch.randn(8, width, device=device, dtype=torch.bfloat16)

    def forward() -> Any:  # noqa: ANN401
        y = x
        for weight in weights:
            y = torch.nn.functional.normalize(y @ weight, dim=1)
        return y

    def wait() -> None:
        if gpu:
            torch.cuda.synchronize()

    replay = _replayed(torch, forward) if gpu else forward
    before = replay().clone()
    kept = [weight.cpu().pin_memory() if gpu else weight.clone() for weight in weights]
    wait()
    found: list[dict[str, float | bool]] = []
    for _ in range(5):
        full, stamps = _held(), [time.perf_counter()]
        for tag in ("kv_cache", "weights"):
            memory.pause(tag)
        wait()
        stamps.append(time.perf_counter())
        left = 1 - (full - _held()) / claimed
        again = time.perf_counter()
        for tag in ("kv_cache", "weights"):
            memory.resume(tag)
        wait()
        stamps.append(time.perf_counter())
        for weight, host in zip(weights, kept, strict=True):
            weight.copy_(host, non_blocking=True)
        wait()
        stamps.append(time.perf_counter())
        y = replay()
        wait()
        took = {"pause": stamps[1] - stamps[0], "resume": stamps[2] - again}
        took |= {"refill": stamps[3] - stamps[2], "kept_share": left}
        found.append({**took, "same": bool(torch.equal(before, y))})
    del cache
    return found


def _replayed(torch: Any, forward: Callable[[], Any]) -> Callable[[], Any]:  # noqa: ANN401
    """The same as a CUDA graph, which writes to the same place each time."""
    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = forward()

    def replay() -> Any:  # noqa: ANN401
        graph.replay()
        torch.cuda.synchronize()
        return y

    return replay


def _held() -> int:
    """Bytes of this process by NVML, or of the whole GPU where it is not listed."""
    time.sleep(_LOOK_SECONDS)
    driver = Nvml()
    held = driver.held(os.getpid())
    return driver.used() if held is None else held


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_cycles(sys.argv[1])) + "\n")
