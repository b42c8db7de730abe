"""An engine that serves FP8 blocks takes the publisher's versions in place and stays exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose_core.identity import WeightVersion
from rose_dev.engine_testing import RealEngine, State, start_engine, write_bundle
from rose_dev.models import RECIPES, Recipe, config, make_model, successors, tensors
from rose_engines.process.client import TurnClient
from rose_engines.tensors.safetensors import read_checkpoint
from rose_engines.weights.control import ControlClient
from rose_trainer import BlockFp8
from rose_trainer.quantised import BLOCK, Scales
from tests.engines.test_real_engine import cycle
from tests.engines.test_real_loaders import Tensors, experts, write

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Whole blocks for each of the matrices that an engine fuses.
PEAKED = replace(RECIPES["tiny-peaked"], name="fp8", kv_heads=4)
FIRST = WeightVersion("fp8", 1, 0)
Model = tuple[dict[str, Any], Tensors]
"""Settings and weights."""
PROMPT = [104, 101, 7, 250, 33, 9]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 24}


def dense(recipe: Recipe) -> Model:
    return config(recipe), tensors(recipe)


def mixture(recipe: Recipe) -> Model:
    """With experts in the place of each MLP, so weak that the next token stays the recipe's."""
    return experts(recipe, inner=BLOCK, spread=0.02)


def quantised(folder: Path, model: Model, scales: Scales) -> Path:
    """A checkpoint in FP8 as the hub has them, quantised by the publisher's own code."""
    settings, plain = model
    method = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    made = dict(BlockFp8(scales=scales)(plain))
    write(folder, settings | {"quantization_config": method}, made)
    for path in make_model(PEAKED).glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@dataclass
class Served:
    """The engine that takes all versions of a kind of model, and what it holds."""

    kind: Callable[[Recipe], Model]
    engine: RealEngine
    version: WeightVersion
    state: State


# SGLang's launcher where SGLang finds, as if installed, the plugin that lets it run FP8 here.
LAUNCHER = """
import os, runpy, sys
sys.path += {folders}
os.environ["SGLANG_PLUGINS"] += ",fp8"
runpy.run_module("rose_engines.sglang.launch", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    record = folder / "fp8_on_cpu-1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: fp8-on-cpu\nVersion: 1\n")
    (record / "entry_points.txt").write_text("[sglang.srt.plugins]\nfp8 = fp8_on_cpu:register\n")
    made = folder / "launch.py"
    made.write_text(LAUNCHER.format(folders=[str(folder), str(Path(__file__).parent)]))
    return made


@pytest.fixture(scope="module", params=[dense, mixture])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, program: Path
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = quantised(folder / "model", request.param(PEAKED), "exact")
    with start_engine(folder, model, version=str(FIRST), program=program) as engine:
        yield Served(request.param, engine, FIRST, read_checkpoint(model))


async def scored(engine: RealEngine) -> tuple[str, list[float], list[int]]:
    """Version, log-probs of a prompt, and greedy tokens."""
    async with TurnClient(engine.url) as client:
        by, result = await client.prompt_logprobs(PROMPT)
        return by, list(result), list((await client.generate([104], GREEDY)).output_ids)


@pytest.mark.parametrize(("seed", "scales"), [(1, "exact"), (2, "power-of-two")])
async def test_a_publishers_fp8_version_committed_in_place_is_what_a_fresh_load_would_be(
    tmp_path: Path,
    served: Served,
    program: Path,
    seed: int,
    scales: Scales,
) -> None:
    """Weights and factors, in the bits and in what is computed with them.

    Those of experts are rows of what the engine stacks of all of them.
    """
    recipe, version = replace(PEAKED, seed=seed), WeightVersion("fp8", 1, seed)
    model = quantised(tmp_path / "model", served.kind(recipe), scales)
    new = read_checkpoint(model)
    assert {one[0] for one in new.values()} == {"BF16", "F8_E4M3", "F32"}
    manifest = write_bundle(tmp_path / "bundle", version, new, (served.version, served.state))
    async with await ControlClient.connect(served.engine.control) as control:
        assert (await control.status()).digest == manifest.base_digest
        await control.stage(tmp_path / "bundle")
        assert (await control.commit(str(version))).digest == manifest.digest
        served.version, served.state = version, new
        assert (await control.attest()).digest == manifest.digest
        (tmp_path / "live").mkdir()
        await control.export(tmp_path / "live" / "m.safetensors")
    committed = await scored(served.engine)
    (tmp_path / "fresh").mkdir()
    fresh = start_engine(tmp_path / "fresh", model, version=str(version), program=program)
    with fresh as engine:
        assert await scored(engine) == committed
    assert committed[2] == cycle(successors(recipe), 104, 24)
    live = read_checkpoint(tmp_path / "live")
    assert live.keys() == new.keys()
    assert all(np.array_equal(live[name][2], one[2]) for name, one in new.items())
