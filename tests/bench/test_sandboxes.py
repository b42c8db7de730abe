"""What ``bench.sandboxes`` says where ways failed: figures of the others, and none made up."""

from __future__ import annotations

from collections import Counter, defaultdict

from bench.sandboxes.__main__ import Tally, figures


def test_a_way_that_saved_nothing_has_no_figures_and_the_others_keep_theirs() -> None:
    found: dict[str, Tally] = defaultdict(Tally)
    found["full every turn"].failed.append("task (CannotCheckpoint: deleted file)")
    found["ours"] = Tally(1, [], 10, [0.5, 0.7], [0.1, 0.2], Counter(full=1, none=1))
    listed = {one.name: one.value for one in figures(found, 1, [1.0, 2.0])}
    assert listed["full every turn: tasks that pass"] == 0
    assert listed["ours: restore, p99"] == 0.2
    assert listed["turns that save nothing"] == 50
    assert not {"bytes against full every turn", "full: checkpoint, median"} & listed.keys()
    assert "restart: played again, mean" not in listed


def test_share_of_bytes_is_of_what_full_checkpoints_saved() -> None:
    found: dict[str, Tally] = defaultdict(Tally)
    found["full every turn"].bytes = 200
    found["ours"].bytes = 20
    listed = {one.name: one.value for one in figures(found, 1, [1.0])}
    assert listed["bytes against full every turn"] == 10
