"""Sizes and fractions against SGLang itself: what ROSE promises is what SGLang builds.

A process of the engine's environment builds every model without memory and sizes its pools with
SGLang's own functions (``sizes_process``); the same configurations go through ROSE's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rose_core.devices.footprint import estimate
from rose_core.devices.memory import CONTEXT_BYTES, GIB, EngineSize
from rose_core.devices.model_size import (
    WINDOW_PERMILLE,
    Stored,
    Unsizable,
    cache_shape,
    weight_bytes,
)
from rose_dev.engine_testing import ended_well, start_beside_engines
from rose_wire.ports import free_port
from tests.engines.model_shapes import SHAPES

pytestmark = pytest.mark.engine

PROGRAM = Path(__file__).with_name("sizes_process.py")
RUNNING = 8
CARDS = {"H100": int(79.6 * GIB), "H200": int(139.8 * GIB)}
HELD = (0.0, 0.2, 0.5, 0.6, 0.7, 0.8)
TOKENS = (8192, 32768, 131072)
# What a CUDA context really took, where ROSE reckons with ``CONTEXT_BYTES``.
CONTEXTS = (int(0.3 * GIB), int(0.6 * GIB), CONTEXT_BYTES)
GRID_MODELS = ("qwen3", "llama-tied", "deepseek-v2-lite", "gpt-oss", "falcon-h1", "qwen3.5-images")


def size_of(name: str, weights: int, tokens: int) -> EngineSize:
    shape = cache_shape(SHAPES[name])
    fixed = estimate({}, RUNNING, latent=shape.latent)
    return EngineSize(weights, shape.per_token, tokens, fixed, state=shape.state_bytes(RUNNING))


class Case:
    """A GPU, serving on it, and an engine that ROSE says fits beside it."""

    def __init__(self, name: str, card: int, held: float, size: EngineSize, context: int) -> None:
        self.name, self.size, self.context = name, size, context
        self.free = int(card * (1 - held))

    @property
    def fits(self) -> bool:
        return self.size.start <= self.free

    def question(self, real_weights: int) -> dict[str, Any]:
        shape = cache_shape(SHAPES[self.name])
        before = self.free - self.context
        return {
            "free_before": before,
            "free_after": before - real_weights,
            "arguments": {
                "mem_fraction_static": self.size.fraction(self.free),
                "max_total_tokens": self.size.kv_tokens,
                "max_running_requests": RUNNING,
                "max_mamba_cache_size": shape.state_slots(RUNNING) or None,
                "swa_full_tokens_ratio": WINDOW_PERMILLE / 1000,
            },
        }


def ask(root: Path, questions: dict[str, Any], ranks: int = 1) -> dict[str, Any]:
    """Answers of the first of so many ranks."""
    asked, port = root / "questions.json", str(free_port())
    asked.write_text(json.dumps(questions))
    answered = [root / f"answers-{rank}.json" for rank in range(ranks)]
    processes = {
        log: start_beside_engines(PROGRAM, [str(rank), str(ranks), port, *files], log, ranks)
        for rank, path in enumerate(answered)
        for log, files in [(path.with_suffix(".log"), [str(asked), str(path)])]
    }
    ended_well(processes, 300)
    found: dict[str, Any] = json.loads(answered[0].read_bytes())
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("shapes")
    for name, shape in SHAPES.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(shape))
    return {name: str(root / name) for name in SHAPES}


@pytest.fixture(scope="module")
def models(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Model -> what SGLang makes of it, and its checkpoint."""
    root = tmp_path_factory.mktemp("models")
    reported = ask(root, {"first": folders["qwen3"], "models": list(folders.values()), "pools": {}})
    return {name: reported["models"][folder] for name, folder in folders.items()}


@pytest.fixture(scope="module")
def grid(
    folders: dict[str, str], models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Case, dict[str, Any]]]:
    """Every case of the grid that ROSE says fits, with SGLang's pool."""
    cases: dict[str, list[Case]] = {name: [] for name in GRID_MODELS}
    for name in GRID_MODELS:
        real = int(models[name]["weights"])
        # Also with a checkpoint that is off by as much as ``model_size`` may be.
        for card, held, tokens, context, off in product(
            CARDS.values(), HELD, TOKENS, CONTEXTS, (0.96, 1.0, 1.04)
        ):
            case = Case(name, card, held, size_of(name, int(real * off), tokens), context)
            if case.fits:
                cases[name].append(case)
    pools = {
        folders[name]: [case.question(int(models[name]["weights"])) for case in some]
        for name, some in cases.items()
    }
    root = tmp_path_factory.mktemp("grid")
    received = ask(root, {"first": folders["qwen3"], "models": [], "pools": pools})["pools"]
    return list(zip((case for some in cases.values() for case in some), received, strict=True))


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_models_size_is_what_sglang_allocates(name: str, models: dict[str, Any]) -> None:
    real = models[name]
    assert "refused" not in real, real
    shape = cache_shape(SHAPES[name])
    stored = [Stored(one, word, tuple(lengths)) for one, word, lengths in real["checkpoint"]]
    assert weight_bytes(SHAPES[name], stored) == pytest.approx(real["weights"], rel=0.05)
    assert shape.per_token == pytest.approx(real["per_token"], rel=0.001)
    assert shape.state == real["state"]


@pytest.fixture(scope="module")
def halves(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the first of two ranks makes of every model that two GPUs can share."""
    root = tmp_path_factory.mktemp("halves")
    asked = {"first": folders["qwen3"], "models": list(folders.values()), "pools": {}}
    reported = ask(root, asked, ranks=2)["models"]
    return {name: reported[folder] for name, folder in folders.items()}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_one_of_two_ranks_holds_what_sglang_allocates(
    name: str, models: dict[str, Any], halves: dict[str, Any]
) -> None:
    real, stored = halves[name], models[name]["checkpoint"]
    assert "refused" not in real, real
    shape = cache_shape(SHAPES[name], 2)
    listed = [Stored(one, word, tuple(lengths)) for one, word, lengths in stored]
    assert weight_bytes(SHAPES[name], listed, 2) == pytest.approx(real["weights"], rel=0.05)
    assert shape.per_token == pytest.approx(real["per_token"], rel=0.001)
    assert shape.state == real["state"]


def test_where_rose_says_it_fits_sglang_builds_the_promised_pool(
    grid: list[tuple[Case, dict[str, Any]]],
) -> None:
    assert len(grid) > 500
    for case, pool in grid:
        where = (case.name, case.free / GIB, case.size, case.context, pool)
        assert "refused" not in pool, where
        assert 0.98 * case.size.kv_tokens <= pool["tokens"] <= case.size.kv_tokens, where
        assert pool["running"] == RUNNING, where


def test_a_share_of_the_whole_gpu_is_what_sglang_refuses(
    folders: dict[str, str], models: dict[str, Any], tmp_path: Path
) -> None:
    """The case that the fraction used to be wrong for: serving holds 60 % of an H200."""
    real = int(models["qwen3"]["weights"])
    case = Case("qwen3", CARDS["H200"], 0.6, size_of("qwen3", real, 32768), CONTEXT_BYTES)
    right, wrong = case.question(real), case.question(real)
    share = (case.size.weights + case.size.kv) / CARDS["H200"]
    wrong["arguments"] = wrong["arguments"] | {"mem_fraction_static": round(share, 3)}
    pools = {folders["qwen3"]: [wrong, right]}
    refused, built = ask(tmp_path, {"first": folders["qwen3"], "models": [], "pools": pools})[
        "pools"
    ]
    assert "Loaded weights leave no GPU memory for the KV cache" in refused["refused"]
    assert built["tokens"] == 32768


def test_an_engine_that_only_just_fits_still_gets_its_pool() -> None:
    size = replace(size_of("qwen3", 15 * GIB, 32768), fixed=CONTEXT_BYTES)
    assert size.fraction(size.start) == 1.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"architectures": None}, "architectures"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"index_topk": 2048}, "index_topk"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"layer_types": ["full_attention", "recurrent"]}, "layer_types has 'recurrent'"),
        ({"num_key_value_heads": "eight"}, "num_key_value_heads"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
    ],
)
def test_what_cannot_be_sized_is_refused_by_the_name_of_its_field(
    change: dict[str, Any], field: str
) -> None:
    with pytest.raises(Unsizable, match=field):
        cache_shape(SHAPES["llama"] | change)
