"""Engine arguments that an RL team may set: the only list of them.

An engine runs on a serving node, so nothing passes that names a path, a host, a plugin or code:
only numbers, switches and words from lists. Memory, ports, weights, the model, parallelism and what
the stop rests on (one iteration at a time) are the platform's, set by the engine host.

The API server refuses names that are not here (a CEL rule of the kind is made from this table), the
operator refuses values, and the engine host asks again before it starts anything: a node trusts
nobody's word. ``docs/api.md`` is generated from it. Every name is one of SGLang 0.5.23's. Where
vLLM 0.32.0 has the same its name stands beside it; engines of vLLM refuse the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Argument:
    """What one argument takes.

    Attributes:
        takes: for people.
        check: whether a value is one of those; must refuse spaces and dashes at the beginning.
        vllm: the same argument of vLLM; empty = it has none that means the same.
    """

    takes: str
    check: Callable[[str], bool]
    vllm: str = ""


def _whole(low: int, high: int, vllm: str = "") -> Argument:
    def check(text: str) -> bool:
        return text.isascii() and text.isdigit() and len(text) < 12 and low <= int(text) <= high

    return Argument(f"{low} to {high}", check, vllm)


def _one_of(*values: str, vllm: str = "") -> Argument:
    return Argument(", ".join(values), lambda text: text in values, vllm)


def _name(what: str) -> Argument:
    pattern = re.compile(r"[a-z0-9_][a-z0-9_-]{0,31}")
    return Argument(what, lambda text: pattern.fullmatch(text) is not None)


def _share(text: str) -> bool:
    return re.fullmatch(r"0(\.\d{1,6})?|1(\.0{1,6})?", text) is not None


def _switch(vllm: str = "") -> Argument:
    return Argument("nothing, or true", lambda text: text in {"", "true"}, vllm)


ROUTED_EXPERTS = "enable-return-routed-experts"
BY_SEED = "enable-deterministic-inference"

ALLOWED: Mapping[str, Argument] = {
    "attention-backend": _one_of("torch_native", "triton", "flashinfer", "fa3", "intel_amx"),
    # A chunk is the longest that serving waits for: 512 tokens take an H200 28 to 60 ms with an 8B.
    "chunked-prefill-size": _whole(16, 512, vllm="max-num-batched-tokens"),
    "disable-cuda-graph": _switch(),
    "disable-radix-cache": _switch(vllm="no-enable-prefix-caching"),
    # No 32 bits: an engine's size is told from the files of its weights.
    "dtype": _one_of("auto", "bfloat16", "float16", vllm="dtype"),
    BY_SEED: _switch(),
    "enable-fp32-lm-head": _switch(),
    "enable-mixed-chunk": _switch(),
    # Routing replay: a mixture of experts says which experts each token went through.
    ROUTED_EXPERTS: _switch(),
    "grammar-backend": _one_of("xgrammar", "outlines", "llguidance", "none"),
    # The KV pool's size is told from 16 bits, and computed anew with other keys it samples others.
    "kv-cache-dtype": _one_of("auto", "bf16", "bfloat16"),
    "max-prefill-tokens": _whole(16, 1 << 20),
    "max-queued-requests": _whole(1, 1 << 20),
    "random-seed": _whole(0, 1 << 31, vllm="seed"),
    "reasoning-parser": _name("a parser's name"),
    "sampling-backend": _one_of("pytorch", "flashinfer"),
    # Above 1 is slower and safer, below 1 the other way; what ROSE sizes holds for up to 1.
    "schedule-conservativeness": Argument("0 to 1", _share),
    "schedule-policy": _one_of("lpm", "fcfs", "lof", "random", "dfs-weight"),
    "stream-interval": _whole(1, 64, vllm="stream-interval"),
    "tool-call-parser": _name("a parser's name"),
    "triton-attention-num-kv-splits": _whole(1, 64),
}
"""Argument name without its dashes -> what it takes."""


def refusals(arguments: Mapping[str, str]) -> tuple[str, ...]:
    """Why arguments are not allowed, one sentence each; empty when all are."""
    return tuple(
        sentence
        for name, value in sorted(arguments.items())
        if (sentence := _refusal(name, value)) is not None
    )


def _refusal(name: str, value: str) -> str | None:
    argument = ALLOWED.get(name)
    if argument is None:
        return f"engine argument {name!r} is not allowed; allowed are {', '.join(sorted(ALLOWED))}"
    if not argument.check(value):
        return f"engine argument {name!r} does not take {value!r}; it takes {argument.takes}"
    return None
