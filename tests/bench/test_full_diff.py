"""A word about a look is judged by what it may have seen, and by nothing else."""

from __future__ import annotations

from bench.sandboxes.full_diff import FullState, surely_changed, surely_same

BARE = FullState({}, "", {})
FILE = FullState({"home/d": ("x",)}, "", {})
JOB = FullState({}, "", {(7, "1"): ("sleep",)})


def test_what_differs_whenever_it_looked_is_a_change() -> None:
    assert surely_changed((BARE, BARE), (FILE, FILE)) == (True, False)
    assert surely_changed((BARE, FILE), (JOB, JOB)) == (False, True)
    assert not surely_same((BARE, BARE), (FILE, FILE))


def test_what_a_job_did_beside_a_look_is_neither_a_change_nor_none() -> None:
    """It wrote a file behind the look, and the next turn removed the file."""
    before, now = (BARE, FILE), (BARE, BARE)
    assert surely_changed(before, now) == (False, False)
    assert not surely_same(before, now)


def test_what_is_the_same_all_along_is_no_change() -> None:
    assert surely_same((FILE, FILE), (FILE, FILE))
