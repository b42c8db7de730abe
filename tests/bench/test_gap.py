"""What the benchmark of version switches counts, and what it runs inside the engine."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.gap import loaders
from bench.gap.__main__ import Stream, StreamEnded, lost


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.arange(6).to(torch.bfloat16))
        self.b = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            dict(self.named_parameters())[name].data.copy_(tensor)


def naming(path: Path) -> list[tuple[str, torch.Tensor]]:
    return [("path", torch.frombuffer(bytearray(str(path).encode()), dtype=torch.uint8))]


def test_time_beyond_the_usual_pace_is_what_a_switch_costs() -> None:
    assert lost([0, 1, 2, 3, 6, 7, 8], 2.5, 4) == pytest.approx(2)
    assert lost([0, 1, 2, 3, 4, 5], 2.5, 4) == 0
    assert lost([0, 1, 2, 3, 4.5, 5], 2.5, 5) == pytest.approx(0)  # late once, early once


async def test_nobody_waits_for_tokens_of_a_stream_that_has_ended() -> None:
    stream = Stream([1.0, 2.0])
    waiting = asyncio.create_task(stream.more(1))
    await asyncio.sleep(0)
    stream.end()
    with pytest.raises(StreamEnded, match="after 2 tokens"):
        await waiting


def test_an_image_brings_every_parameter_back(tmp_path: Path) -> None:
    model = Model()
    loaders.load_image(model, naming(tmp_path / "image"))
    with torch.no_grad():
        model.a.fill_(7)
    loaders.load_image(model, naming(tmp_path / "image"))
    assert model.a.tolist() == list(range(6))


def test_tensors_reach_the_model_through_its_own_loader(tmp_path: Path) -> None:
    model = Model()
    new = {"a": torch.full((6,), 3.0), "b": torch.zeros(2, 3)}
    save_file({name: one.to(torch.bfloat16) for name, one in new.items()}, tmp_path / "t")
    loaders.load_tensors(model, naming(tmp_path / "t"))
    assert model.a.tolist() == [3.0] * 6
    assert model.b.sum() == 0
