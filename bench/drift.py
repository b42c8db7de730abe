"""``python -m bench.drift``: how far engines answer the fixed prompt from the trainer.

*Right* is whatever an engine may do without being wrong: compute in 16 bits, add in another order,
split a matrix over ranks and add rounded sums, quantise to FP8 blocks. *Wrong* is what a digest of
the live weights cannot see: weights that lie in the wrong place, in the map and in the check alike,
or settings and kernels that compute something else. A real SGLang answers too: the trained weights
are committed into it as any version is.

The model has learnt something (bytes of this repository's pages): random weights answer nearly
evenly, so neither rounding nor faults show in them as they do in a model whose log-probs are sharp.
Training is plain AdamW over FP32 masters, a few minutes on two cores, the same on every machine up
to its arithmetic.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.record import Figure, figure, log, record
from rose_core.delta.probe import LIMIT, NOTICE, PROMPT, Answer, distance
from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_dev.engine_testing import State as Stored
from rose_dev.engine_testing import start_engine, write_bundle
from rose_dev.models import MID, TINY, Recipe, config, tensors
from rose_engines.process.client import TurnClient
from rose_engines.weights.control import ControlClient
from rose_trainer.quantised import BlockFp8

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

_WIDE = replace(MID, name="drift-wide", layers=12, hidden=384, intermediate=1024, heads=6)
MODELS: dict[str, tuple[Recipe, int]] = {
    "tiny": (replace(TINY, name="drift-tiny"), 400),
    "mid": (replace(MID, name="drift-mid"), 300),
    "wide": (_WIDE, 240),
}
"""Shape and number of training steps."""

NOTES = (
    "mean difference of the fixed prompt's log-probs, in nats, from the same weights in FP32",
    "models trained here on this repository's pages; no pretrained model can be had without a hub",
    "real engines are SGLang on CPU; no figure is of a GPU",
)
_WAIT_SECONDS = 60.0
RANKS = (2, 4, 8)
_FP8_BLOCK = 128
PAGES = Path(__file__).parents[1] / "docs"
BATCH, LENGTH = 4, 96
State = dict[str, torch.Tensor]
Change = Callable[[State], State]


def text() -> torch.Tensor:
    """Bytes of all pages, one after the other."""
    data = b"\n".join(path.read_bytes() for path in sorted(PAGES.rglob("*.md")))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def build(recipe: Recipe, state: State, dtype: torch.dtype, **settings: object) -> Qwen3ForCausalLM:
    """A model of the recipe that computes in ``dtype``.

    Args:
        recipe: its shape.
        state: its weights.
        dtype: of weights and computation.
        settings: changes of its configuration.
    """
    # Brings PyTorch's compiler: two seconds for every process that only imports this.
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    model = Qwen3ForCausalLM(Qwen3Config(**{**config(recipe), **settings}))
    model.load_state_dict(state)
    model.to(dtype)  # type: ignore[arg-type]  # its stub takes itself for the type
    model.eval()  # type: ignore[no-untyped-call]
    return model


def train(recipe: Recipe, steps: int, rate: float) -> Iterator[tuple[float, State]]:
    """Loss in nats a byte and the weights as they would be published, after every step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # on a shared machine two wait for each other
    model = build(recipe, tensors(recipe), torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    data, draw = text(), torch.Generator().manual_seed(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20)
        starts = torch.randint(len(data) - LENGTH, (BATCH, 1), generator=draw)
        batch = data[starts + torch.arange(LENGTH)]
        loss = model(batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield float(loss.detach()), published(model)


def trained(recipe: Recipe, steps: int, rate: float = 2e-3) -> tuple[State, State]:
    """The weights before the last step and after it."""
    before: State = {}
    after: State = {}
    for step, (loss, state) in enumerate(train(recipe, steps, rate)):
        before, after = after, state
        if step % 20 == 0 or step == steps - 1:
            sys.stdout.write(f"  {recipe.name}: step {step}: {loss:.2f} nats a byte\n")
            sys.stdout.flush()
    return before, after


def published(model: Qwen3ForCausalLM) -> State:
    """Weights in BF16, as engines hold them."""
    state = model.state_dict().items()
    return {name: tensor.detach().to(torch.bfloat16).clone() for name, tensor in state}


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


def right_answers(recipe: Recipe, state: State) -> Iterator[tuple[str, Answer]]:
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


def wrong_answers(recipe: Recipe, state: State, before: State) -> Iterator[tuple[str, Answer]]:
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


def model_figures(name: str, with_engines: bool) -> tuple[list[Figure], float, dict[str, float]]:
    """All figures of one model, the largest of right answers, and those of wrong ones."""
    recipe, steps = MODELS[name]
    before, state = trained(recipe, steps)
    truth = reference(recipe, state)
    right = {what: distance(truth, found) for what, found in _right(recipe, state, with_engines)}
    wrong = {what: distance(truth, found) for what, found in wrong_answers(recipe, state, before)}
    found = [figure(f"{name}: largest logit", largest_logit(recipe, state), "")]
    found += [
        figure(f"{name}: right: {what}", one, "nats", at_most=NOTICE) for what, one in right.items()
    ]
    found += [figure(f"{name}: wrong: {what}", one, "nats") for what, one in wrong.items()]
    return found, max(right.values()), wrong


def _right(recipe: Recipe, state: State, with_engines: bool) -> Iterator[tuple[str, Answer]]:
    yield from right_answers(recipe, state)
    if with_engines:
        for ranks in (1, 2):
            yield (
                f"SGLang, {ranks} rank{'s' * (ranks > 1)}",
                engine_answer(recipe, state, ranks),
            )


def main(argv: list[str]) -> int:
    """Measure every model and print the table.

    Returns:
        0; an aim that was not met shows in the table.
    """
    parser = argparse.ArgumentParser(prog="bench.drift", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--no-engines", action="store_true", help="torch alone, without SGLang")
    arguments = parser.parse_args(argv)
    found: list[Figure] = []
    for name in arguments.models:
        log(name)
        figures, noise, wrong = model_figures(name, not arguments.no_engines)
        caught = sum(one > LIMIT for one in wrong.values())
        noticed = sum(one > NOTICE for one in wrong.values())
        found += [
            *figures,
            figure(f"{name}: largest of the right ones, of the limit", noise / LIMIT, ""),
            figure(f"{name}: wrong ones quarantined, of {len(wrong)}", caught, ""),
            figure(f"{name}: wrong ones that people are told of", noticed, ""),
        ]
    record("drift", found, notes=NOTES)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
