"""Version labels survive a round trip and refuse anything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rose_core.api.rolloutlease import Weights
from rose_core.identity import WeightVersion, is_base, published, run_name

RUNS = st.from_regex(r"\A[a-z0-9]([-a-z0-9.]{0,20}[a-z0-9])?\Z")
NUMBERS = st.integers(min_value=0, max_value=2**62)


@given(run=RUNS, incarnation=NUMBERS, sequence=NUMBERS)
def test_a_label_reads_back_as_the_same_version(run: str, incarnation: int, sequence: int) -> None:
    version = WeightVersion(run, incarnation, sequence)
    assert WeightVersion.parse(str(version)) == version


@pytest.mark.parametrize("text", ["", "v0", "run@1", "run@1.x", "Run@1.2", "run@1.2.3", "@1.2"])
def test_anything_else_is_refused_with_the_text_in_the_message(text: str) -> None:
    with pytest.raises(ValueError, match="no weight version"):
        WeightVersion.parse(text)


@given(run=RUNS)
def test_what_a_version_can_carry_can_name_a_run(run: str) -> None:
    assert run_name(run) == run


@given(run=RUNS)
def test_what_can_name_a_run_can_be_leased(run: str) -> None:
    assert Weights(store_name="main", run=run).run == run


@pytest.mark.parametrize("text", ["", "R_", "a/b", "../a", "a" * 64, "-a", "a@1.2"])
def test_no_run_has_another_name(text: str) -> None:
    with pytest.raises(ValueError, match="is no run name: lower-case letters"):
        run_name(text)
    if text:  # an empty one says that the weights are frozen
        with pytest.raises(ValidationError):
            Weights(store_name="main", run=text)


def test_versions_of_a_run_are_ordered_by_incarnation_first() -> None:
    rewound = WeightVersion("run", incarnation=2, sequence=0)
    assert rewound > WeightVersion("run", incarnation=1, sequence=99)


@given(run=RUNS, digits=st.from_regex(r"\A[0-9a-f]{32}\Z"))
def test_version_0_is_named_by_its_digest_and_reads_back(run: str, digits: str) -> None:
    version = WeightVersion.of_base(run, digits)
    assert str(version) == f"{run}@base.{digits[:12]}"
    assert WeightVersion.parse(str(version)) == version
    assert version.is_base


def test_two_checkpoints_are_two_versions_and_both_are_older_than_what_is_published() -> None:
    one, other = (WeightVersion.of_base("run", digit * 32) for digit in "1f")
    assert one != other
    first = WeightVersion("run", 0, 0)
    assert not first.is_base
    assert max(one, other) < first


def test_a_label_says_whether_a_trainer_has_published_it() -> None:
    assert published("run@1.0") == WeightVersion("run", 1, 0)
    assert not is_base("run@1.0")
    assert published("run@base.0123456789ab") is None
    assert is_base("run@base.0123456789ab")
    for other in ("", "base", "v1", "run@base.0123"):
        assert published(other) is None
        assert not is_base(other)


@pytest.mark.parametrize("digest", ["", "0" * 11, "x" * 32])
def test_what_is_no_digest_names_no_checkpoint(digest: str) -> None:
    with pytest.raises(ValueError, match="no weight version"):
        WeightVersion.of_base("run", digest)
