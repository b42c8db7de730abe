"""How long a decode step and a prefill take on a GPU: a fit of measured tables.

Decode step of ``B`` sequences with ``S`` context tokens in all, milliseconds:
``t0 + a B + b S / 1000``. The fit sums measured kernels (ai-dynamo/aiconfigurator, vLLM 0.24, bf16,
tensor parallel 1; largest error 5.4 %). It agrees with published figures of single streams;
at saturation engines reach about half of it (range 0.4 to 0.6), so a *derate* lowers the speed:
not at all for one sequence, fully from ``SATURATED`` on, linearly between. Prefill assumes a model
FLOPs utilisation of 0.45. Tensor parallelism divides both by ``n * 0.8`` (assumed).

With *attention*, prefill also pays, at the same utilisation, for every pair of a new token and one
before it: ``4 layers width`` operations beside the ``2 parameters`` of the token itself, which
brings prompts of 32k tokens from 1.55 to 1.13 times the published speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rose_simulate.model.scenarios.scenario import RolloutJob

SATURATED = 32
_PARALLEL_EFFICIENCY = 0.8


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted figures of one model on one device; see the module.

    Attributes:
        tokens_per_pair: what a pair costs in attention, as a share of a token's own prefill; 0 =
            attention is left out.
    """

    t0_ms: float
    per_sequence_ms: float
    per_1k_context_ms: float
    weights_gb: float
    kv_bytes_per_token: int
    prefill_tokens_per_s: float
    tokens_per_pair: float = 0.0


_WEIGHTS = {
    "Qwen2.5-7B": (15.23, 57344, 29280.0),
    "Qwen3-8B": (16.38, 147456, 27137.0),
    "Qwen2.5-14B": (29.54, 196608, 15035.0),
    "Qwen3-14B": (29.54, 163840, 15035.0),
    "Qwen2.5-32B": (65.53, 262144, 6784.0),
    "Qwen3-32B": (65.52, 262144, 6784.0),
}
# Layers, and heads times their size, of each model's configuration.
_ATTENTION = {
    "Qwen2.5-7B": (28, 3584),
    "Qwen3-8B": (36, 4096),
    "Qwen2.5-14B": (48, 5120),
    "Qwen3-14B": (40, 5120),
    "Qwen2.5-32B": (64, 5120),
    "Qwen3-32B": (64, 8192),
}
_STEPS = {
    ("H100", "Qwen2.5-7B"): (6.443, 0.00689, 0.0186),
    ("H100", "Qwen3-8B"): (7.167, 0.00696, 0.04736),
    ("H100", "Qwen2.5-14B"): (12.0, 0.01358, 0.06522),
    ("H100", "Qwen3-14B"): (11.747, 0.0118, 0.05448),
    ("H100", "Qwen2.5-32B"): (25.206, 0.02155, 0.08725),
    ("H100", "Qwen3-32B"): (25.208, 0.02296, 0.08734),
    ("H200", "Qwen2.5-7B"): (5.179, 0.00775, 0.01319),
    ("H200", "Qwen3-8B"): (5.779, 0.01, 0.03373),
    ("H200", "Qwen2.5-14B"): (9.394, 0.01369, 0.04578),
    ("H200", "Qwen3-14B"): (9.132, 0.01296, 0.03821),
    ("H200", "Qwen2.5-32B"): (19.06, 0.02524, 0.06122),
    ("H200", "Qwen3-32B"): (19.109, 0.02248, 0.06431),
}
MEMORY_GB = {"H100": 80.0, "H200": 141.0}
MODELS = tuple(_WEIGHTS)
DEVICES = tuple(MEMORY_GB)


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Times of one model on one replica of ``gpus`` GPUs, seconds."""

    fit: Fit
    derate: float
    gpus: int = 1
    draft_nodes: int = 0
    tokens_per_step: float = 1.0

    @property
    def _scale(self) -> float:
        return 1e-3 if self.gpus == 1 else 1e-3 / (self.gpus * _PARALLEL_EFFICIENCY)

    def step(self, batch: int, context: int) -> tuple[float, float]:
        """Time of the next token of each, and by how much each further one is longer.

        With drafts a step takes what it takes without, and the prefill of what it verifies; it
        gives several tokens.
        """
        first, growth = self._step(batch, context)
        if not self.draft_nodes:
            return first, growth
        verified = self._reading(self.draft_nodes * batch)
        return (first + verified) / self.tokens_per_step, growth / self.tokens_per_step

    def _step(self, batch: int, context: int) -> tuple[float, float]:
        fit = self.fit
        saturation = min(1.0, (batch - 1) / (SATURATED - 1))
        scale = self._scale / (1.0 - (1.0 - self.derate) * saturation)
        first = fit.t0_ms + fit.per_sequence_ms * batch + fit.per_1k_context_ms * context / 1000
        return first * scale, fit.per_1k_context_ms * batch / 1000 * scale

    def prefill(self, tokens: int, pairs: float) -> float:
        """Time to prefill so many tokens, which attend to so many pairs (``pairs``)."""
        return self._reading(tokens + pairs * self.fit.tokens_per_pair) + 0.6e-3

    def _reading(self, work: float) -> float:
        return work / self.fit.prefill_tokens_per_s * self._scale * 1e3


def costs(
    device: str,
    model: str,
    derate: float,
    gpus: int = 1,
    *,
    attention: bool = False,
    draft_nodes: int = 0,
    tokens_per_step: float = 1.0,
) -> ModelCosts:
    """The cost model of a model on a device.

    Args:
        device: of the replica's GPUs.
        model: of ``MODELS``.
        derate: see the module.
        gpus: of the replica.
        attention: prefill pays for it too.
        draft_nodes: tokens that a step verifies for each sequence; 0 = it has no drafts.
        tokens_per_step: that such a step gives each.
    """
    weights, kv_bytes, prefill = _WEIGHTS[model]
    layers, width = _ATTENTION[model]
    # Weights of two bytes: as many operations per token as there are bytes.
    per_pair = 4 * layers * width / (weights * 1e9) if attention else 0.0
    fit = Fit(*_STEPS[device, model], weights, kv_bytes, prefill, per_pair)
    return ModelCosts(fit, derate, gpus, draft_nodes, tokens_per_step)


def costs_of(
    job: RolloutJob, device: str, gpus: int, derate: float, *, attention: bool = False
) -> ModelCosts:
    """The cost model of a job's engine, with its drafts; ``costs`` has the arguments."""
    return costs(
        device,
        job.model,
        derate,
        gpus,
        attention=attention,
        draft_nodes=job.draft_nodes,
        tokens_per_step=job.tokens_per_step,
    )


def pairs(new: int, before: int = 0) -> float:
    """Pairs that ``new`` tokens after ``before`` others attend to."""
    return new * (before + new / 2)


def kv_tokens(device: str, model: str, share: float, gpus: int = 1) -> int:
    """Tokens whose keys fit beside the weights into a share of the device's memory."""
    weights, kv_bytes, _ = _WEIGHTS[model]
    free = MEMORY_GB[device] * gpus * share - weights
    return max(0, int(free * 1e9 / kv_bytes))


def steps_in(first: float, growth: float, work: float) -> int:
    """How many whole steps fit into ``work`` seconds."""
    if growth <= 0.0:
        return int(work / first + 1e-9)
    half = first - growth / 2
    return int((-half + math.sqrt(half * half + 2 * growth * work)) / growth + 1e-9)


def time_of(first: float, growth: float, steps: int) -> float:
    """Seconds of ``steps`` steps."""
    return steps * first + growth * steps * (steps - 1) / 2
