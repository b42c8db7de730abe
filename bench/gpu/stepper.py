"""Steps as long as a real model's, in a process of its own: ``python -m bench.gpu.stepper``.

An 8B-shaped model (36 layers, 13.9 GB) whose steps are CUDA graphs, because that is what a stop has
to wait for: one graph is launched at once and runs to its end. It needs torch alone. On a CPU
(``--device cpu --tiny``) the same steps are eager and small, so that every order can be rehearsed.

    loop KIND | pause    compute steps of a kind, or come to rest after the one under way
    loop churn           allocate, copy, capture and free, as an engine does that starts
    once KIND N          print N steps: [[began_ns, end_ns, length_ms], ...]
    take                 print the steps since the last ``take``, and forget them
    worst                print the longest of each piece of churn, seconds
    memory               allocate and free 256 MiB; print the seconds
    rest                 print true once no piece of work is under way
    queue MS             launch so much work without waiting for it; print true
    quit

Times are CLOCK_MONOTONIC; on a GPU the ends come from its own events, so a step that ends while
this process is frozen has its true end. Next step: ``beside`` gives the orders.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Kind: tokens of new input per sequence, sequences, context.
KINDS = {
    "decode1": (1, 1, 8192),
    "decode32": (1, 32, 8192),
    # What ROSE gives an engine of such a context (``rose_core.guard.chunk.prefill_chunk``).
    "prefill": (416, 1, 4096),
    "prefill_32k": (208, 1, 32768),
    "prefill2k": (2048, 1, 2048),
}
_IDLE_SECONDS = 0.0005
# After each step of a rehearsal, which tries orders: the core is others' too.
_REHEARSED_SECONDS = 0.005
Step = tuple[int, int, float]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    layers: int = 36
    hidden: int = 4096
    ffn: int = 12288
    heads: int = 32
    kv_heads: int = 8
    head: int = 128

    @classmethod
    def of(cls, *, tiny: bool) -> Shape:
        """An 8B, or one that a CPU can rehearse with."""
        return cls(2, 64, 128, 4, 2, 16) if tiny else cls()


def sizes(kind: str, *, tiny: bool) -> tuple[int, int, int]:
    """Tokens, sequences and context of a kind."""
    tokens, batch, context = KINDS[kind]
    return (min(tokens, 8), min(batch, 2), min(context, 64)) if tiny else (tokens, batch, context)


class Model:
    """The weights, and one step of each kind."""

    def __init__(self, torch: Any, device: str, kinds: list[str], *, tiny: bool) -> None:  # noqa: ANN401
        self._torch = torch
        self._shape = shape = Shape.of(tiny=tiny)
        self.gpu = device == "cuda"

        def made(*size: int) -> Any:  # noqa: ANN401  # a tensor
            return torch.randn(*size, device=device, dtype=torch.bfloat16) * 0.02

        rows = (shape.heads + 2 * shape.kv_heads) * shape.head
        self._weights = [
            (
                made(rows, shape.hidden),
                made(shape.hidden, shape.heads * shape.head),
                made(2 * shape.ffn, shape.hidden),
                made(shape.hidden, shape.ffn),
            )
            for _ in range(shape.layers)
        ]
        wanted = {kind: sizes(kind, tiny=tiny) for kind in kinds}
        most = max(batch * context for _, batch, context in wanted.values())
        # One buffer for all layers: a step reads as much, and 13.9 GB leave room for two processes.
        self._kv = made(2, most * shape.kv_heads * shape.head)
        tensors = [self._kv, *(one for layer in self._weights for one in layer)]
        self.bytes = sum(one.numel() * one.element_size() for one in tensors)
        self.run: dict[str, Callable[[], object]] = {}
        for kind, (tokens, batch, context) in wanted.items():
            x = made(tokens * batch, shape.hidden)
            self.run[kind] = self._compiled(x, tokens, batch, context)
        self.wait()

    def wait(self) -> None:
        """Until everything that was launched has ended."""
        if self.gpu:
            self._torch.cuda.synchronize()

    def _compiled(self, x: Any, tokens: int, batch: int, context: int) -> Callable[[], object]:  # noqa: ANN401
        torch = self._torch
        if not self.gpu:
            return lambda: self._step(x, tokens, batch, context)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step(x, tokens, batch, context)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(x, tokens, batch, context)
        replay: Callable[[], object] = graph.replay
        return replay

    def _step(self, x: Any, tokens: int, batch: int, context: int) -> Any:  # noqa: ANN401
        shape, ops = self._shape, self._torch.nn.functional
        held = batch * context * shape.kv_heads * shape.head
        keys, values = (
            self._kv[i][:held].view(batch, shape.kv_heads, context, shape.head) for i in (0, 1)
        )
        for qkv, out, up, down in self._weights:
            y = ops.linear(x, qkv)[:, : shape.heads * shape.head]
            q = y.view(batch, tokens, shape.heads, shape.head).transpose(1, 2)
            a = ops.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            x = x + ops.linear(a.transpose(1, 2).reshape(batch * tokens, -1), out)
            gate, wide = ops.linear(x, up).chunk(2, dim=1)
            x = x + ops.linear(ops.silu(gate) * wide, down)
        return x


class Stepper:
    """Carries out the orders; see the module."""

    def __init__(self, torch: Any, model: Model, piece_bytes: int) -> None:  # noqa: ANN401
        self._torch = torch
        self._model = model
        self._piece = piece_bytes
        self._lock = threading.Lock()
        self._asked = threading.Event()
        self._ended = threading.Event()
        self._wanted: str | None = None
        self._steps: list[Step] = []
        self._worst: dict[str, float] = {}
        self._zero: Any = None
        self._host: Any = None
        if model.gpu:
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record()
            self._zero.synchronize()
        self._zero_ns = time.monotonic_ns()

    def serve(self) -> None:
        """Until told to quit."""
        threading.Thread(target=self._listen, daemon=True).start()
        while not self._ended.is_set():
            name = self._wanted
            if name is None or self._asked.is_set():
                time.sleep(_IDLE_SECONDS)
                continue
            with self._lock:
                if self._wanted != name:
                    continue  # told otherwise while this waited: what is said of it must hold
                if name == "churn":
                    self._churn()
                else:
                    self._steps.append(self._once(name))
            if not self._model.gpu:
                time.sleep(_REHEARSED_SECONDS)

    def _listen(self) -> None:
        for line in sys.stdin:
            verb, *rest = line.split()
            if verb == "quit":
                break
            if verb in {"loop", "pause"}:
                self._wanted = rest[0] if rest else None
                continue
            self._asked.set()
            with self._lock:
                sys.stdout.write(json.dumps(self._answer(verb, rest)) + "\n")
                sys.stdout.flush()
            self._asked.clear()
        self._ended.set()

    def _answer(self, verb: str, rest: list[str]) -> object:
        if verb == "once":
            return [self._once(rest[0]) for _ in range(int(rest[1]))]
        if verb == "take":
            taken, self._steps = self._steps, []
            return taken
        if verb == "worst":
            worst, self._worst = self._worst, {}
            return worst
        if verb == "memory":
            began = time.monotonic()
            self._torch.empty(self._piece, dtype=self._torch.uint8, device=self._device())
            self._forget()
            return time.monotonic() - began
        if verb == "rest":
            return True  # asked under the lock, so the piece has ended
        if verb == "queue":
            if self._model.gpu:
                for _ in range(int(rest[0]) // 10):
                    self._torch.cuda._sleep(20_000_000)  # noqa: SLF001  # about 10 ms of clock cycles
            return True
        raise ValueError(f"unknown order {verb}")

    def _device(self) -> str:
        return "cuda" if self._model.gpu else "cpu"

    def _forget(self) -> None:
        if self._model.gpu:
            self._torch.cuda.empty_cache()

    def _once(self, kind: str) -> Step:
        began = time.monotonic_ns()
        if not self._model.gpu:
            self._model.run[kind]()
            end = time.monotonic_ns()
            return began, end, (end - began) / 1e6
        before, after = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        self._model.run[kind]()
        after.record()
        after.synchronize()
        end = self._zero_ns + int(self._zero.elapsed_time(after) * 1e6)
        return began, end, float(before.elapsed_time(after))

    def _churn(self) -> None:
        """What an engine that starts does to the driver."""
        torch, gpu = self._torch, self._model.gpu
        if self._host is None:
            self._host = torch.empty(self._piece, dtype=torch.uint8, pin_memory=gpu)
        began = time.monotonic()
        taken = torch.empty(self._piece, dtype=torch.uint8, device=self._device())
        taken.copy_(self._host, non_blocking=True)
        self._model.wait()
        del taken
        self._forget()
        self._note("alloc_copy_free", began)
        if gpu:
            began = time.monotonic()
            graph, x = torch.cuda.CUDAGraph(), torch.ones(1024, device="cuda")
            with torch.cuda.graph(graph):
                x.mul(2)
            graph.replay()
            self._model.wait()
            self._note("capture", began)

    def _note(self, what: str, began: float) -> None:
        self._worst[what] = max(self._worst.get(what, 0.0), time.monotonic() - began)


def main(argv: list[str]) -> int:
    """Entry of the process."""
    parser = argparse.ArgumentParser(prog="bench.gpu.stepper")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--kinds", default="decode1")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(argv)
    torch: Any = importlib.import_module("torch")
    if options.device == "cpu":
        torch.set_num_threads(1)
    model = Model(torch, options.device, options.kinds.split(","), tiny=options.tiny)
    reserved = int(torch.cuda.memory_reserved()) if model.gpu else model.bytes
    sys.stdout.write(json.dumps({"pid": os.getpid(), "reserved": reserved}) + "\n")
    sys.stdout.flush()
    Stepper(torch, model, 1 << (16 if options.tiny else 28)).serve()
    os._exit(0)  # what was queued on the GPU is nobody's any more


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
