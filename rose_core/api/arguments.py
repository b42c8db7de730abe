"""Engine arguments an RL team may set.

An engine runs on a serving node, so nothing passes that names a path, a host, a plugin or code:
only numbers, switches and words from lists. Memory, ports, weights, the model and parallelism are
the platform's, set by the engine host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_BOOLEAN = re.compile(r"^(|true|false)$")
_INTEGER = re.compile(r"^\d{1,9}$")
_NUMBER = re.compile(r"^\d{1,4}(\.\d{1,6})?$")


def _words(*words: str) -> re.Pattern[str]:
    return re.compile("^(" + "|".join(map(re.escape, words)) + ")$")


ALLOWED: dict[str, re.Pattern[str]] = {
    "attention-backend": _words("flashinfer", "fa3", "fa4", "triton", "torch_native", "intel_amx"),
    "chunked-prefill-size": _INTEGER,
    "cuda-graph-max-bs": _INTEGER,
    "disable-cuda-graph": _BOOLEAN,
    "disable-overlap-schedule": _BOOLEAN,
    "disable-radix-cache": _BOOLEAN,
    "dtype": _words("auto", "half", "float16", "bfloat16", "float32"),
    "enable-deterministic-inference": _BOOLEAN,
    "enable-fp32-lm-head": _BOOLEAN,
    "grammar-backend": _words("xgrammar", "outlines", "llguidance", "none"),
    "kv-cache-dtype": _words("auto", "fp8_e4m3", "fp8_e5m2", "bf16"),
    "page-size": _INTEGER,
    "random-seed": _INTEGER,
    "sampling-backend": _words("flashinfer", "pytorch"),
    "schedule-conservativeness": _NUMBER,
    "schedule-policy": _words("lpm", "fcfs", "lof", "random", "dfs-weight"),
    "triton-attention-num-kv-splits": _INTEGER,
}
"""Argument name without its dashes -> what its value must match; an empty value is a switch."""


def refusals(arguments: Mapping[str, str]) -> tuple[str, ...]:
    """Why arguments are not allowed, one sentence each; empty when all are."""
    return tuple(
        sentence
        for name, value in sorted(arguments.items())
        if (sentence := _refusal(name, value)) is not None
    )


def _refusal(name: str, value: str) -> str | None:
    pattern = ALLOWED.get(name)
    if pattern is None:
        return f"engine argument {name!r} is not on the allow-list"
    if not pattern.fullmatch(value):
        return f"engine argument {name!r} does not take {value!r}; it must match {pattern.pattern}"
    return None
