"""An engine on a GPU: its size, its fraction of the device, and what is too little."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rose_agent.devices.fake_nvml import FakeGpu, FakeMemory, FakeNvml
from rose_agent.devices.nvml import NvmlDriver
from rose_agent.host.classes import LAUNCHERS
from rose_agent.host.errors import BadEngine, NoMemory
from rose_agent.host.launchers import EngineOrder
from rose_agent.host.sizing import FIXED_BYTES, Sizer, engine_size, vocabulary
from rose_core.wire.sync import EngineSpec
from rose_engines.rundir import RunDir

GIB = 1 << 30
SPEC = EngineSpec("sglang", "model", kv_tokens=1 << 16)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"vocab_size": 500}', 500),
        ('{"text_config": {"vocab_size": 400}}', 400),
        ("{}", 0),
        ("[", 0),
    ],
)
def test_how_many_tokens_a_model_knows_is_read_from_its_folder(
    tmp_path: Path, config: str, words: int
) -> None:
    (tmp_path / "config.json").write_text(config)
    assert vocabulary(tmp_path) == words


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 4 GiB (a file with a hole) with 32 layers of 8 heads, 128 wide."""
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(4 * GIB)
    return folder


def order(model: Path, used: int) -> EngineOrder:
    gpu = FakeGpu("GPU-a", FakeMemory(80 * GIB, used))
    sizer = Sizer(NvmlDriver.open(FakeNvml([gpu])))
    slot = RunDir(model.parent).slot("slot-1")
    return EngineOrder(SPEC, slot, model, Path("/python"), 1234, ("GPU-a",), sizer)


def test_an_engines_size_comes_from_its_model_and_its_tokens(model: Path) -> None:
    size = engine_size(model, SPEC)
    assert (size.weights, size.kv_per_token, size.fixed) == (4 * GIB, 128 << 10, FIXED_BYTES)
    assert size.total == 12 * GIB + FIXED_BYTES


def test_the_engine_is_told_its_fraction_its_gpu_and_to_save_memory(model: Path) -> None:
    program = LAUNCHERS["sglang"](order(model, 40 * GIB))
    flags = dict(zip(program.argv, program.argv[1:], strict=False))
    assert flags["--mem-fraction-static"] == "0.15"
    assert flags["--max-total-tokens"] == str(1 << 16)
    assert flags["--device"] == "cuda"
    assert "--enable-memory-saver" in program.argv
    assert program.environment["CUDA_VISIBLE_DEVICES"] == "GPU-a"


def test_too_little_memory_is_refused_with_the_figures(model: Path) -> None:
    with pytest.raises(NoMemory, match=r"needs 15360 MiB .* has 10240 MiB free of 81920"):
        LAUNCHERS["sglang"](order(model, 70 * GIB))


def test_a_model_without_a_shape_is_refused_by_name(model: Path) -> None:
    (model / "config.json").write_text("{}")
    with pytest.raises(BadEngine, match="model model: its size cannot be told"):
        engine_size(model, SPEC)


def test_a_gpu_engine_needs_a_gpu(model: Path) -> None:
    with pytest.raises(BadEngine, match="--devices nvml"):
        Sizer().claim("slot-1", engine_size(model, SPEC), ("GPU-a",))


def test_engines_that_start_together_do_not_count_on_the_same_memory(model: Path) -> None:
    made = order(model, 60 * GIB)  # 20 GiB are free, and an engine takes 15
    LAUNCHERS["sglang"](made)
    twin = replace(made, slot=made.slot.twin)
    with pytest.raises(NoMemory, match="15360 promised to engines that start"):
        LAUNCHERS["sglang"](twin)
    LAUNCHERS["sglang"](made)  # a start that is tried again counts once
    made.sizer.settle(made.slot.uid)
    LAUNCHERS["sglang"](twin)
