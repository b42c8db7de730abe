"""Leases whose engine is spread over several GPUs of a replica."""

from __future__ import annotations

from dataclasses import replace

from rose_core.api import Reason
from rose_core.lending import plan
from tests.lending.world import NOW, lease, lent, replica, world

ONE = replica("a")
TWO = replica("b", gpus=("GPU-b0", "GPU-b1"), kv_permille=200)
EIGHT = replica("c", gpus=tuple(f"GPU-c{number}" for number in range(8)), kv_permille=300)
WIDE = lease("wide", max_slots=3, gpus_per_slot=2)


def test_only_replicas_with_as_many_gpus_are_lent_to_it() -> None:
    assert lent(world([ONE, TWO, EIGHT], [WIDE])) == [("r/wide", "b"), ("r/wide", "c")]
    assert lent(world([ONE, TWO, EIGHT], [replace(WIDE, gpus_per_slot=8)])) == [("r/wide", "c")]


def test_what_is_too_narrow_for_it_is_left_to_others() -> None:
    narrow = lease("narrow", max_slots=1)
    wide = replace(WIDE, priority=9)
    assert ("r/narrow", "a") in lent(world([ONE, TWO, EIGHT], [wide, narrow]))


def test_it_reads_how_many_gpus_replicas_have() -> None:
    outcome = plan(world([ONE], [WIDE]), NOW).outcomes["r/wide"]
    (verdict,) = outcome.verdicts
    assert verdict.reason is Reason.TOO_FEW_GPUS
    assert verdict.message == "it has 1 GPUs, gpusPerSlot is 2"
    assert "1 TooFewGPUs" in outcome.message


def test_a_pool_says_that_none_of_its_replicas_is_wide_enough() -> None:
    eight = replace(WIDE, gpus_per_slot=8)
    (misfit,) = plan(world([ONE, TWO], [eight]), NOW).misfits["s/chat"]
    assert (misfit.lease, misfit.reason) == ("r/wide", Reason.TOO_FEW_GPUS)
    assert misfit.text == "gpusPerSlot is 8, the pool's replicas have 2 GPUs at most"
    assert not plan(world([ONE, TWO, EIGHT], [eight]), NOW).misfits
    assert not plan(world([ONE, replica("d", gpus=())], [eight]), NOW).misfits, "not known yet"
