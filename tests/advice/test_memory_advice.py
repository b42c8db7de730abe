"""What serving's memory fraction lends and costs: figures, the command's words, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rose_cli.main import main
from rose_core.devices.memory import (
    CONTEXT_BYTES,
    GIB,
    EngineSize,
    Headroom,
    MemorySum,
    lendable,
)
from rose_simulate.advice.errors import NoRoom
from rose_simulate.advice.memory import (
    Serving,
    ServingEngineKind,
    SettingChange,
    changes,
    largest,
    settings,
)
from tests.engines.model_shapes import SHAPES

CARD = int(139.8 * GIB)
EIGHT = Serving(weights=15 * GIB, per_token=144 << 10)
ROLLOUT = EngineSize(15 * GIB, 144 << 10, 16384, 3 * GIB)


def model(folder: Path, name: str, gib: float, **changes: Any) -> Path:  # noqa: ANN401
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name] | changes))
    index = {"metadata": {"total_size": int(gib * GIB)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_what_is_lent_is_taken_from_servings_kv_pool() -> None:
    """A gibibyte more to lend is a gibibyte of KV cache less: nothing comes from nowhere."""
    most, least = settings(CARD, EIGHT, ROLLOUT, Headroom(), (0.8, 0.6))
    assert least.lends - most.lends == pytest.approx(least.given_up * EIGHT.per_token, rel=1e-3)
    assert (most.given_up, most.tokens - least.tokens) == (0, least.given_up)


def test_sglangs_fraction_is_of_free_memory_and_vllms_of_all() -> None:
    other = Serving(15 * GIB, 144 << 10, engine=ServingEngineKind.VLLM)
    assert EIGHT.used(CARD, 0.5) - other.used(CARD, 0.5) == pytest.approx(
        CONTEXT_BYTES // 2 + EIGHT.besides, abs=2
    )
    assert other.pool(CARD, 0.5) < EIGHT.pool(CARD, 0.5)


def test_the_largest_fraction_that_fits_is_named_and_the_next_does_not_fit() -> None:
    best = largest(CARD, EIGHT, ROLLOUT, Headroom())
    (above,) = settings(CARD, EIGHT, ROLLOUT, Headroom(), (best.fraction + 0.01,))
    assert best.fits(ROLLOUT)
    assert not above.fits(ROLLOUT)


def test_a_gibibyte_less_headroom_lends_one_more() -> None:
    (kept,) = settings(CARD, EIGHT, ROLLOUT, Headroom(gib=4), (0.7,))
    (less,) = settings(CARD, EIGHT, ROLLOUT, Headroom(gib=3), (0.7,))
    assert less.lends - kept.lends == GIB
    assert less.first_hour == less.lends, "the owner's figure counts at once"


def test_a_model_that_fits_nowhere_is_refused_with_every_number() -> None:
    huge = EngineSize(130 * GIB, 1 << 10, 1024, 3 * GIB)
    with pytest.raises(NoRoom, match=r"needs 133\.0 GiB .* 139\.8 GiB may be lent: .* missing"):
        largest(CARD, EIGHT, huge, Headroom())
    with pytest.raises(NoRoom, match="lend whole replicas"):
        largest(CARD, EIGHT, huge, Headroom())
    with pytest.raises(NoRoom, match="take GPUs with more memory"):
        largest(CARD, EIGHT, EngineSize(160 * GIB, 1 << 10, 1024, 0), Headroom())
    with pytest.raises(NoRoom, match="leave no KV pool"):
        largest(CARD, Serving(140 * GIB, 1 << 10), ROLLOUT, Headroom())


def test_the_command_says_what_each_fraction_lends_and_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving, rollout = (str(model(tmp_path / one, "qwen3", 15.3)) for one in ("s", "r"))
    flags = ["--gpu", "H200", "--serving", serving, "--rollout", rollout]
    assert main(["advise", "memory", *flags, "--fraction", "0.88", "--fraction", "0.7"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0] == (
        "A rollout engine takes 22.7 GiB of one GPU: weights 15.3 GiB, KV 2.2 GiB for 16384 "
        "tokens, besides 5.1 GiB (estimated until measured)."
    )
    assert output[3].split()[:6] == ["0.88", "10.7", "GiB", "(7.7", "GiB)", "no"]
    assert output[4].split()[:6] == ["0.70", "35.6", "GiB", "(32.6", "GiB)", "yes,"]
    assert "fewer" in output[4]
    assert any(line.startswith("The largest fraction at which it fits is 0.79") for line in output)


def test_the_command_refuses_what_fits_nowhere_and_what_cannot_be_sized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = str(model(tmp_path / "small", "llama-tied", 2.3))
    huge = str(model(tmp_path / "huge", "deepseek-v3", 1250))
    odd = str(model(tmp_path / "odd", "llama", 15, index_topk=2048))
    flags = ["advise", "memory", "--gpu", "79.6", "--serving", small, "--rollout"]
    assert main([*flags, huge]) == 1
    assert "take GPUs with more memory" in capsys.readouterr().err
    assert main([*flags, odd]) == 1
    assert "index_topk is set" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([*flags, str(tmp_path / "empty")]) == 1
    assert "config.json" in capsys.readouterr().err


def test_a_gpu_that_is_neither_known_nor_a_size_is_a_mistake_of_the_caller(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["advise", "memory", "--gpu", "huge", "--serving", ".", "--rollout", "."])
    assert ended.value.code == 2
    assert "'huge' is neither H100, H200 nor a size in GiB" in capsys.readouterr().err


def parts(fraction: float, *, watched_s: float = 86_400.0) -> MemorySum:
    """As a guard would measure serving that was started with this fraction."""
    found = lendable(CARD, EIGHT.used(CARD, fraction), Headroom(), watched_s)
    assert found.parts is not None
    assert found.parts.lends == found.bytes
    return found.parts


def by_setting(found: tuple[SettingChange, ...]) -> dict[str, SettingChange]:
    return {one.setting: one for one in found}


@pytest.mark.parametrize("engine", list(ServingEngineKind))
def test_a_smaller_fraction_on_a_measured_gpu_is_what_that_fraction_would_have_lent(
    engine: ServingEngineKind,
) -> None:
    serving = Serving(15 * GIB, 144 << 10, engine=engine)
    now = lendable(CARD, serving.used(CARD, 0.8), Headroom(), 86_400.0).parts
    assert now is not None
    table = by_setting(changes(now, ROLLOUT, engine, serving=serving))
    flag = (
        "--mem-fraction-static"
        if engine is ServingEngineKind.SGLANG
        else "--gpu-memory-utilization"
    )
    before, after = settings(CARD, serving, ROLLOUT, Headroom(), (0.8, 0.7))
    found = table[f"{flag} 0.10 less"]
    assert found.lends == pytest.approx(after.lends, abs=8)
    assert found.tokens == pytest.approx(before.tokens - after.tokens, abs=1)
    assert found.starts


def test_every_gibibyte_of_a_smaller_fraction_is_paid_for_in_kv_tokens() -> None:
    now = parts(0.88)
    for one in changes(now, ROLLOUT, ServingEngineKind.SGLANG, serving=EIGHT):
        gained = one.lends - now.lends
        assert gained == pytest.approx(one.pool + one.margin, abs=8)
        if one.pool:
            assert one.tokens == one.pool // EIGHT.per_token


def test_the_least_that_the_owner_has_to_give_up_is_in_the_table_and_less_does_not_fit() -> None:
    now = parts(0.88)
    found = [
        one for one in changes(now, ROLLOUT, ServingEngineKind.SGLANG, serving=EIGHT) if one.pool
    ]
    fitting = [one for one in found if one.fits]
    step = (CARD - CONTEXT_BYTES) // 100
    assert 0 <= fitting[0].lends - ROLLOUT.total < step
    assert all(one.pool < fitting[0].pool for one in found if not one.fits)


def test_a_lease_that_asks_for_less_costs_the_owner_nothing() -> None:
    now = parts(0.88)
    table = by_setting(changes(now, ROLLOUT, ServingEngineKind.SGLANG, fp8_weights=8 * GIB))
    half = table["kvTokens: 8192"]
    assert ROLLOUT.total - half.takes == 8192 * ROLLOUT.kv_per_token
    assert ROLLOUT.total - table["FP8 checkpoint"].takes == 7 * GIB
    assert (half.pool, half.margin, half.lends) == (0, 0, now.lends)


def test_a_headroom_of_the_owners_own_and_a_day_of_watching_are_in_the_table() -> None:
    table = by_setting(changes(parts(0.8, watched_s=0.0), ROLLOUT, ServingEngineKind.SGLANG))
    assert table["watched for a day"].lends - table[""].lends == 3 * GIB
    assert table["memoryHeadroomGiB: 2"].lends - table[""].lends == 4 * GIB
    assert table["memoryHeadroomGiB: 2"].margin == 4 * GIB


def test_serving_whose_weights_no_longer_fit_does_not_start_so_nothing_fits_beside_it() -> None:
    huge = Serving(weights=100 * GIB, per_token=144 << 10)
    now = lendable(CARD, huge.used(CARD, 0.88), Headroom(), 86_400.0).parts
    assert now is not None
    table = by_setting(changes(now, ROLLOUT, ServingEngineKind.SGLANG, serving=huge))
    assert table["--mem-fraction-static 0.05 less"].starts
    gone = table["--mem-fraction-static 0.30 less"]
    assert (gone.starts, gone.fits) == (False, False)
