"""What the same weights answer under other arithmetic, and what wrong weights or settings answer.

*Right* is whatever an engine may do without being wrong: compute in 16 bits, add in another order,
split a matrix over ranks and add rounded sums, quantise to FP8 blocks. *Wrong* is what a digest of
the live weights cannot see: weights that lie in the wrong place, in the map and in the check alike,
or settings and kernels that compute something else. A real SGLang answers too: the trained weights
are committed into it as any version is.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.drift.trained import State, build
from rose_core.delta.probe import PROMPT, Answer
from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_dev.engine_testing import State as Stored
from rose_dev.engine_testing import start_engine, write_bundle
from rose_dev.models import Recipe
from rose_engines.process.client import TurnClient
from rose_engines.weights.control import ControlClient
from rose_trainer.quantised import BlockFp8

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

_WAIT_SECONDS = 60.0
RANKS = (2, 4, 8)
_FP8_BLOCK = 128
Change = Callable[[State], State]


@torch.no_grad()
def answer(model: Qwen3ForCausalLM) -> Answer:
    """Log-probs of the fixed prompt, computed at once."""
    tokens = torch.tensor([PROMPT])
    logits = model(tokens, use_cache=False).logits[0, :-1].float()
    chosen = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return tuple(chosen.tolist())


def reference(recipe: Recipe, state: State) -> Answer:
    """The trainer's: published weights, computed in FP32."""
    return answer(build(recipe, state, torch.float32))


def largest_logit(recipe: Recipe, state: State) -> float:
    """The largest magnitude of a logit of the fixed prompt, which sets how it is rounded."""
    with torch.no_grad():
        model = build(recipe, state, torch.float32)
        return float(model(torch.tensor([PROMPT]), use_cache=False).logits.abs().max())


def right(recipe: Recipe, state: State) -> Iterator[tuple[str, Answer]]:
    """Name and answer of every arithmetic."""
    half = torch.bfloat16
    for attention in ("eager", "sdpa"):
        model = build(recipe, state, half, attn_implementation=attention)
        yield f"BF16, {attention} attention", answer(model)
    yield "FP16", answer(build(recipe, state, torch.float16))
    for ranks in RANKS:
        yield f"BF16 over {ranks} ranks", answer(_split(build(recipe, state, half), ranks))
    quantised = build(recipe, _through_fp8(state), half)
    yield "FP8 blocks, from BF16 weights", answer(quantised)


class _RowParallel(torch.nn.Module):
    """A matrix cut along its columns: every rank's sum is rounded before they are added."""

    def __init__(self, whole: torch.nn.Linear, ranks: int) -> None:
        super().__init__()
        self._parts = [part.contiguous() for part in whole.weight.chunk(ranks, 1)]

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' sums."""
        cut = given.chunk(len(self._parts), -1)
        pairs = zip(cut, self._parts, strict=True)
        total, *more = (torch.nn.functional.linear(one, part) for one, part in pairs)
        for part in more:
            total = total + part
        return total


def _split(model: Qwen3ForCausalLM, ranks: int) -> Qwen3ForCausalLM:
    for layer in model.model.layers:
        layer.self_attn.o_proj = _RowParallel(layer.self_attn.o_proj, ranks)
        layer.mlp.down_proj = _RowParallel(layer.mlp.down_proj, ranks)
    return model


def _through_fp8(state: State) -> State:
    made = dict(BlockFp8()(state))
    found: State = {}
    for name, tensor in made.items():
        if name.endswith("_scale_inv"):
            continue
        scales = made.get(f"{name}_scale_inv")
        found[name] = tensor if scales is None else _spread(tensor, scales)
    return found


def _spread(tensor: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, columns = tensor.shape
    wide = scales.repeat_interleave(_FP8_BLOCK, 0).repeat_interleave(_FP8_BLOCK, 1)
    return (tensor.float() * wide[:rows, :columns]).to(torch.bfloat16)


def wrong(recipe: Recipe, state: State, before: State) -> Iterator[tuple[str, Answer]]:
    """Name and answer of every fault, each in the middle layer where it is in one."""
    place = f"model.layers.{recipe.layers // 2}."
    for name, change in _faults(recipe, place).items():
        yield f"{name}, one layer", answer(build(recipe, change(dict(state)), torch.float32))
    everywhere = _all(recipe, lambda at: _swapped(f"{at}mlp.gate_proj", f"{at}mlp.up_proj"))
    yield (
        "gate and up swapped, all layers",
        answer(build(recipe, everywhere(dict(state)), torch.float32)),
    )
    yield (
        "rotary base a hundredfold",
        answer(build(recipe, state, torch.float32, rope_parameters=_rotary(1e6))),
    )
    fewer = replace(recipe, layers=recipe.layers - 1)
    kept = {name: one for name, one in state.items() if f"layers.{recipe.layers - 1}." not in name}
    yield "last layer left out", answer(build(fewer, kept, torch.float32))
    yield (
        "one layer of the version before",
        answer(build(recipe, {**state, **_layer(before, place)}, torch.float32)),
    )
    yield "the version before", answer(build(recipe, before, torch.float32))


def _rotary(theta: float) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": theta}


def _faults(recipe: Recipe, place: str) -> dict[str, Change]:
    return {
        "gate and up swapped": _swapped(f"{place}mlp.gate_proj", f"{place}mlp.up_proj"),
        "query heads off by one": _rolled(f"{place}self_attn.q_proj", recipe.head_size),
        "value heads off by one": _rolled(f"{place}self_attn.v_proj", recipe.head_size),
        "rows off by one": _rolled(f"{place}mlp.up_proj", 1),
        "half of down_proj not added": _half(f"{place}mlp.down_proj"),
        "half of o_proj not added": _half(f"{place}self_attn.o_proj"),
        "an FP8 factor twice too large": _scaled(f"{place}mlp.down_proj", 2.0),
    }


def _all(recipe: Recipe, make: Callable[[str], Change]) -> Change:
    def change(state: State) -> State:
        for layer in range(recipe.layers):
            state = make(f"model.layers.{layer}.")(state)
        return state

    return change


def _swapped(one: str, other: str) -> Change:
    def change(state: State) -> State:
        first, second = f"{one}.weight", f"{other}.weight"
        return {**state, first: state[second], second: state[first]}

    return change


def _rolled(name: str, rows: int) -> Change:
    return _changed(name, lambda weight: weight.roll(rows, 0))


def _half(name: str) -> Change:
    def cut(weight: torch.Tensor) -> torch.Tensor:
        kept = weight.clone()
        kept[:, weight.shape[1] // 2 :] = 0
        return kept

    return _changed(name, cut)


def _scaled(name: str, factor: float) -> Change:
    return _changed(name, lambda weight: weight * factor)


def _changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda state: {**state, f"{name}.weight": change(state[f"{name}.weight"])}


def _layer(state: State, place: str) -> State:
    return {name: one for name, one in state.items() if name.startswith(place)}


def engine_answer(recipe: Recipe, state: State, ranks: int) -> Answer:
    """Log-probs of the fixed prompt from an engine over so many ranks."""
    version = WeightVersion("drift", 1, 0)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_bundle(folder / "bundle", version, _bits(state))
        with start_engine(folder, recipe, ranks=ranks) as engine:
            return asyncio.run(_ask(engine.url, engine.control, folder / "bundle", str(version)))


async def _ask(url: str, control: Path, bundle: Path, version: str) -> Answer:
    async with await ControlClient.connect(control) as client:
        staged = await client.stage(bundle)
        await client.commit(staged.version, _WAIT_SECONDS)
    async with TurnClient(url) as engine:
        by, found = await engine.prompt_logprobs(PROMPT)
    if by != version:
        message = f"the engine answered with {by} instead of {version}"
        raise RuntimeError(message)
    return found


def _bits(state: State) -> Stored:
    return {
        name: StoredTensor(
            "BF16",
            tuple(tensor.shape),
            tensor.contiguous().view(torch.int16).numpy().view("u2").ravel(),
        )
        for name, tensor in state.items()
    }
