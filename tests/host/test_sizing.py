"""An engine on a GPU: its size, its fraction of the free memory, and what is too little."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from rose_agent.devices.nvml import NvmlDriver
from rose_agent.errors import BadEngine, NoMemory
from rose_agent.host.memory.footprints import Footprints
from rose_agent.host.memory.sizing import Sizer, engine_size, vocabulary
from rose_agent.host.processes.classes import LAUNCHERS
from rose_agent.host.processes.launchers import EngineOrder
from rose_core.devices.footprint import MARGIN_BYTES, Footprint, estimate
from rose_core.identity import GpuUuid
from rose_core.wire.sync import AdapterSpec, EngineSpec, Sharing
from rose_dev.gpu.library import STATE
from rose_dev.gpu.state import State
from rose_engines.node.rundir import RunDir
from rose_engines.sglang.arguments import DRAFTS_VARIABLE

GIB = 1 << 30
ESTIMATE = estimate({}, 8, latent=False)
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


def test_elastic_memory_is_for_engines_of_one_gpu(model: Path) -> None:
    wide = msgspec.structs.replace(SPEC, ranks=2, sharing=Sharing(memory_source="Elastic"))
    with pytest.raises(BadEngine, match="gpusPerSlot is 2: memorySource Elastic is for slots of"):
        engine_size(model, wide, Footprints())


@pytest.fixture(autouse=True)
def gpu(nvml: State) -> None:
    """One of 80 GiB; ``order`` sets how much of it is in use."""
    nvml.raw.gpu_count = 1
    raw = nvml.gpus[0].raw
    raw.uuid, raw.memory_total = b"GPU-a", 80 * GIB


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 4 GiB (a file with a hole) with 32 layers of 8 heads, 128 wide."""
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    entry = {"dtype": "BF16", "shape": [2 << 10, 1 << 20], "data_offsets": [0, 4 * GIB]}
    header = json.dumps({"model.layers.0.mlp.up_proj.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * GIB)
    return folder


def order(model: Path, used: int) -> EngineOrder:
    with State.open(Path(os.environ[STATE])) as nvml:
        nvml.gpu("GPU-a").raw.memory_used = used
    sizer = Sizer(NvmlDriver.open())
    slot = RunDir(model.parent).slot("slot-1")
    return EngineOrder(SPEC, slot, model, Path("/python"), 1234, (GpuUuid("GPU-a"),), sizer)


def test_an_engines_size_comes_from_its_model_and_its_tokens(model: Path) -> None:
    size = engine_size(model, SPEC, Footprints()).size
    assert (size.weights, size.kv_per_token, size.fixed) == (4 * GIB, 128 << 10, ESTIMATE)
    assert size.total == 12 * GIB + ESTIMATE


def test_an_adapters_pool_is_part_of_the_size(model: Path) -> None:
    """Two slots of two matrices of rank 16; gate and up come in one stack, attention in another."""
    pool = 2 * 2 * 16 * ((2 << 10) + (1 << 20))
    for target, more in (("gate_proj", pool), ("q_proj", 0)):
        spec = msgspec.structs.replace(SPEC, adapter=AdapterSpec(16, (target,)))
        assert engine_size(model, spec, Footprints()).size.weights == 4 * GIB + more
    eight = msgspec.structs.replace(SPEC, adapter=AdapterSpec(16, ("gate_proj",), 8))
    assert engine_size(model, eight, Footprints()).size.weights == 4 * GIB + pool // 2 * 9


def test_an_engine_on_gpus_drafts_where_its_lease_says_so(model: Path) -> None:
    plain = order(model, 40 * GIB)
    drafting = replace(plain, spec=msgspec.structs.replace(SPEC, drafts=True))
    for program, drafts in (
        (LAUNCHERS["sglang"](plain), False),
        (LAUNCHERS["sglang"](drafting), True),
    ):
        assert program.drafts is drafts
        assert ("--speculative-algorithm" in program.argv) is drafts
        assert (DRAFTS_VARIABLE in program.environment) is drafts


def test_the_engine_is_told_its_share_of_the_free_memory_and_its_gpu(model: Path) -> None:
    """40 GiB are free and 1 of them becomes its context: 4 + 8 and what may be off, of 39."""
    program = LAUNCHERS["sglang"](order(model, 40 * GIB))
    flags = dict(zip(program.argv, program.argv[1:], strict=False))
    assert float(flags["--mem-fraction-static"]) == pytest.approx(12.45 / 39, abs=0.001)
    assert flags["--cuda-graph-max-bs-decode"] == flags["--max-running-requests"]
    assert flags["--max-total-tokens"] == str(1 << 16)
    assert flags["--device"] == "cuda"
    assert "--enable-memory-saver" in program.argv
    assert program.environment["CUDA_VISIBLE_DEVICES"] == "GPU-a"


def test_too_little_memory_is_refused_with_the_figures(model: Path) -> None:
    with pytest.raises(NoMemory, match=r"needs 17.1 GiB .* has 10.0 GiB free") as refused:
        LAUNCHERS["sglang"](order(model, 70 * GIB))
    assert refused.value.needed == 12 * GIB + ESTIMATE


def test_a_model_without_a_shape_is_refused_by_name(model: Path) -> None:
    (model / "config.json").write_text("{}")
    with pytest.raises(BadEngine, match="model model: its size cannot be told: architectures is"):
        engine_size(model, SPEC, Footprints())


def test_a_damaged_file_of_weights_is_refused_by_name(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadEngine, match=r"model\.safetensors"):
        engine_size(model, SPEC, Footprints())


def test_a_gpu_engine_needs_a_gpu(model: Path) -> None:
    with pytest.raises(BadEngine, match="--devices nvml"):
        Sizer().claim("slot-1", engine_size(model, SPEC, Footprints()).size, (GpuUuid("GPU-a"),))


def test_engines_that_start_together_do_not_count_on_the_same_memory(model: Path) -> None:
    made = order(model, 60 * GIB)  # 20 GiB are free, and an engine takes 17
    LAUNCHERS["sglang"](made)
    twin = replace(made, slot=made.slot.twin)
    with pytest.raises(NoMemory, match=r"17\.1 GiB promised to engines that start"):
        LAUNCHERS["sglang"](twin)
    LAUNCHERS["sglang"](made)  # a start that is tried again counts once
    made.sizer.settle(made.slot.uid)
    LAUNCHERS["sglang"](twin)


def test_where_the_driver_limits_it_the_share_is_of_the_limit(model: Path) -> None:
    """The engine then sees its own size as the whole GPU."""
    made = order(model, 0)
    limit = msgspec.structs.replace(SPEC, sharing=Sharing(memory_limit="Driver"))
    limited = replace(made, spec=limit)
    open_ = LAUNCHERS["sglang"](made).argv
    closed = LAUNCHERS["sglang"](limited).argv
    share = [float(argv[argv.index("--mem-fraction-static") + 1]) for argv in (open_, closed)]
    size = engine_size(model, SPEC, Footprints()).size
    assert share == [size.fraction(80 * GIB), size.fraction(size.total)]
    assert (share[0] < 0.2, share[1] > 0.7) == (True, True)


def test_what_was_measured_takes_the_place_of_the_estimate(model: Path, tmp_path: Path) -> None:
    footprints = Footprints(tmp_path / "footprints")
    first = engine_size(model, SPEC, footprints)
    footprints.remember(first.kind, Footprint(2 * GIB))
    after_a_restart = Footprints(tmp_path / "footprints")
    assert engine_size(model, SPEC, after_a_restart).size.fixed == 2 * GIB + MARGIN_BYTES
    for other in (
        engine_size(model, SPEC, after_a_restart, gpu="another card"),
        engine_size(model, SPEC, after_a_restart, version="another version"),
        engine_size(model, msgspec.structs.replace(SPEC, kv_tokens=1), after_a_restart),
    ):
        assert other.size.fixed == ESTIMATE, "another kind is measured for itself"
