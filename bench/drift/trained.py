"""A small model that has learnt something: bytes of this repository's pages.

Random weights answer nearly evenly, so neither rounding nor faults show in them as they do in a
model whose log-probs are sharp. Training is plain AdamW over FP32 masters, a few minutes on two
cores, the same on every machine up to its arithmetic.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rose_dev.models import Recipe, config, tensors

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

PAGES = Path(__file__).parents[2] / "docs"
BATCH, LENGTH = 4, 96
State = dict[str, torch.Tensor]


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
