"""An engine that serves FP8 blocks takes the publisher's versions in place and stays exact."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from rose_core.identity import WeightVersion
from rose_dev.engine_environment import engine_python
from rose_dev.engine_template import Template
from rose_dev.engine_testing import RealEngine, State, prepare, until_ended, write_bundle
from rose_dev.models import RECIPES, Recipe, config, make_model, successors, tensors
from rose_engines.client import TurnClient
from rose_engines.control import ControlClient
from rose_engines.launch import Launch
from rose_engines.safetensors import read_checkpoint
from rose_engines.sglang.arguments import command, environment
from rose_trainer import BlockFp8
from rose_trainer.quantised import BLOCK, Scales
from tests.engines.test_real_engine import cycle
from tests.engines.test_real_loaders import write

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Whole blocks for each of the matrices that an engine fuses.
PEAKED = replace(RECIPES["tiny-peaked"], name="fp8", kv_heads=4)
FIRST = WeightVersion("fp8", 1, 0)
PROMPT = [104, 101, 7, 250, 33, 9]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 24}


def quantised(folder: Path, recipe: Recipe, scales: Scales) -> Path:
    """A checkpoint in FP8 as the hub has them, quantised by the publisher's own code."""
    method = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    made = dict(BlockFp8(scales=scales)(tensors(recipe)))
    write(folder, config(recipe) | {"quantization_config": method}, made)
    for path in make_model(recipe).glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@dataclass
class Served:
    """The engine that takes all versions, and what it holds."""

    engine: RealEngine
    version: WeightVersion
    state: State


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Template, dict[str, str]]]:
    """A process that has imported SGLang where it finds the plugin that lets it run FP8 here."""
    folder = tmp_path_factory.mktemp("plugin")
    record = folder / "fp8_on_cpu-1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: fp8-on-cpu\nVersion: 1\n")
    (record / "entry_points.txt").write_text("[sglang.srt.plugins]\nfp8 = fp8_on_cpu:register\n")
    usual = environment(Launch(engine_python(), folder, 0, plugin_socket=folder / "s"), os.environ)
    more = {
        "SGLANG_PLUGINS": f"{usual['SGLANG_PLUGINS']},fp8",
        "PYTHONPATH": f"{usual['PYTHONPATH']}:{folder}:{Path(__file__).parent}",
    }
    with closing(Template(engine_python(), usual | more)) as made:
        yield made, more


@contextmanager
def start_fp8(
    folder: Path, model: Path, version: WeightVersion, plugin: tuple[Template, Mapping[str, str]]
) -> Iterator[RealEngine]:
    """SGLang with ROSE's plugin, and beside it the one that lets it run FP8 here."""
    template, more = plugin
    spec, launch, holder = prepare(folder, model, None, str(version), engine_python(), opened=True)
    variables = {**environment(launch, os.environ), **more}
    with (folder / "engine.log").open("wb") as log:
        process = template.start(command(spec, launch)[3:], variables, log.fileno())
    with until_ended(folder, launch, process, holder) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, template: tuple[Template, Mapping[str, str]]
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = quantised(folder / "model", PEAKED, "exact")
    with start_fp8(folder, model, FIRST, template) as engine:
        yield Served(engine, FIRST, read_checkpoint(model))


async def said(engine: RealEngine) -> tuple[str, list[float], list[int]]:
    """Version, log-probs of a prompt, and greedy tokens."""
    async with TurnClient(engine.url) as client:
        by, told = await client.prompt_logprobs(PROMPT)
        return by, list(told), list((await client.generate([104], GREEDY)).output_ids)


@pytest.mark.parametrize(("seed", "scales"), [(1, "exact"), (2, "power-of-two")])
async def test_a_publishers_fp8_version_committed_in_place_is_what_a_fresh_load_would_be(
    tmp_path: Path,
    served: Served,
    template: tuple[Template, Mapping[str, str]],
    seed: int,
    scales: Scales,
) -> None:
    """Weights and factors, in the bits and in what is computed with them."""
    recipe, version = replace(PEAKED, seed=seed), WeightVersion("fp8", 1, seed)
    model = quantised(tmp_path / "model", recipe, scales)
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
    committed = await said(served.engine)
    (tmp_path / "fresh").mkdir()
    with start_fp8(tmp_path / "fresh", model, version, template) as engine:
        assert await said(engine) == committed
    assert committed[2] == cycle(successors(recipe), 104, 24)
    live = read_checkpoint(tmp_path / "live")
    assert live.keys() == new.keys()
    assert all(np.array_equal(live[name][2], one[2]) for name, one in new.items())
