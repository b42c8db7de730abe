"""What an engine claims to have released is compared with what was measured."""

import pytest

from rose_core.devices.dormancy import judge

MB = 1 << 20


def test_memory_that_is_free_makes_an_engine_dormant_and_the_rest_is_its_residue() -> None:
    verdict = judge(1000 * MB, 150 * MB, 800 * MB)
    assert verdict.accepted
    assert (verdict.released_bytes, verdict.residue_bytes) == (850 * MB, 150 * MB)


@pytest.mark.parametrize(("before", "after"), [(None, 5), (5, None), (None, None)])
def test_unknown_is_not_free(before: int | None, after: int | None) -> None:
    verdict = judge(before, after, 5)
    assert verdict.refusal == "MemoryUnknown"
    assert verdict.residue_bytes is None


@pytest.mark.parametrize(
    ("after", "claimed"),
    [(1000 * MB, 800 * MB), (700 * MB, 800 * MB), (1100 * MB, 800 * MB), (1000 * MB, 0)],
    ids=["nothing freed", "too little freed", "grown", "nothing claimed"],
)
def test_an_answer_without_effect_is_refused_with_the_figures(after: int, claimed: int) -> None:
    verdict = judge(1000 * MB, after, claimed)
    assert verdict.refusal == "NothingReleased"
    assert str(claimed) in verdict.message
    assert str(after) in verdict.message
