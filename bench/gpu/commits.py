"""Weights on a GPU, in the shapes of real models: commit, digest, memory saver.

One per cent of every tensor changes. Three ways to put it in: as ROSE does today (per tensor: copy
positions and bits, scatter, wait, copy again and compare), one scatter over one arena from pinned
memory, and one from memory that lies on the device already. Qwen3-8B has 399 tensors and
Qwen3-30B-A3B 18,867, so a pause that grows with their number shows. torch and numpy are all it
needs; the digest is ROSE's own and needs its packages. Next step: ``aims``.
"""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.gpu.beside import Measured, Scale

MODELS = ("8B", "30B-A3B")
_SAVED = 430  # matrices of 4096 x 4096: 14 GB


def shapes(model: str, *, tiny: bool) -> Iterator[tuple[int, ...]]:
    """Tensors of a checkpoint."""
    if model == "8B":
        hidden, inner, layers, queries, keys, experts = 4096, 12288, 36, 4096, 1024, 0
    else:
        hidden, inner, layers, queries, keys, experts = 2048, 768, 48, 4096, 512, 128
    words = 151936
    if tiny:
        hidden, inner, layers, queries, keys, words = 64, 32, 2, 64, 32, 256
        experts = min(experts, 4)
    yield from ((words, hidden), (words, hidden), (hidden,))
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
        digests: Any = importlib.import_module("rose_engines.device_digest")
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
    if not scale.gpu:
        return [("saver.pause_resume_p50", 0.0, "s"), ("saver.changed", 0, "results")]
    start = (
        "import torch_memory_saver as t, subprocess, sys\n"
        "with t.configure_subprocess():\n"
        "    sys.exit(subprocess.call([sys.executable, '-m', 'bench.gpu.commits']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", start], capture_output=True, text=True, timeout=200, check=False
    )
    if done.returncode != 0:
        raise OSError(done.stderr.strip()[-400:] or "the memory saver's process failed")
    cycles = json.loads(done.stdout.strip().splitlines()[-1])
    both = [cycle["pause"] + cycle["resume"] for cycle in cycles]
    return [
        ("saver.pause_resume_p50", statistics.median(both), "s"),
        ("saver.refill_p50", statistics.median(cycle["refill"] for cycle in cycles), "s"),
        ("saver.changed", sum(not cycle["same"] for cycle in cycles), "results"),
    ]


def _cycles() -> list[dict[str, float | bool]]:
    """Inside the saver's own process: five times let go, take back, fill, replay."""
    torch: Any = importlib.import_module("torch")
    memory: Any = importlib.import_module("torch_memory_saver").torch_memory_saver
    with memory.region(tag="weights"):
        kind = torch.bfloat16
        weights = [torch.randn(4096, 4096, device="cuda", dtype=kind) for _ in range(_SAVED)]
    with memory.region(tag="kv_cache"):
        cache = torch.zeros(10 << 30, dtype=torch.uint8, device="cuda")
    x = torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16)

    def forward() -> Any:  # noqa: ANN401
        y = x
        for weight in weights:
            y = torch.nn.functional.normalize(y @ weight, dim=1)
        return y

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = forward()
    graph.replay()
    torch.cuda.synchronize()
    before, kept = y.clone(), [weight.cpu().pin_memory() for weight in weights]
    found: list[dict[str, float | bool]] = []
    for _ in range(5):
        stamps = [time.perf_counter()]
        for step in (memory.pause, memory.resume):
            for tag in ("kv_cache", "weights"):
                step(tag)
            torch.cuda.synchronize()
            stamps.append(time.perf_counter())
        for weight, host in zip(weights, kept, strict=True):
            weight.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        stamps.append(time.perf_counter())
        graph.replay()
        torch.cuda.synchronize()
        names = ("pause", "resume", "refill")
        took = {name: stamps[i + 1] - stamps[i] for i, name in enumerate(names)}
        found.append({**took, "same": bool(torch.equal(before, y))})
    del cache
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_cycles()) + "\n")
