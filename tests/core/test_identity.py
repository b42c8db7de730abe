"""Version labels survive a round trip and refuse anything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.identity import WeightVersion

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


def test_versions_of_a_run_are_ordered_by_incarnation_first() -> None:
    rewound = WeightVersion("run", incarnation=2, sequence=0)
    assert rewound > WeightVersion("run", incarnation=1, sequence=99)
