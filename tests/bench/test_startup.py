"""The parts of a start: told apart by lines of a log as they arrive, and nothing lost between."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.startup import PARTS, READY, Stamps, figures, parts
from rose_dev.errors import StartFailed
from rose_dev.waiting import wait_until


def stamped(*texts: str) -> Stamps:
    return Stamps([(f"[12:00:00] {text}\n", 10.0 + 2 * i) for i, text in enumerate(texts, 1)])


def test_the_parts_of_a_start_add_up_to_the_whole() -> None:
    found = parts(stamped(*(text for _, text in PARTS)), 10.0, 50.0)
    assert list(found) == [*(name for name, _ in PARTS), READY]
    assert sum(found.values()) == pytest.approx(40.0)
    assert found["loading the weights"] == pytest.approx(2.0)


def test_a_log_with_other_words_is_refused_by_the_line_that_is_missing() -> None:
    with pytest.raises(StartFailed, match="Init parallel begin"):
        parts(stamped("server_args="), 10.0, 50.0)


def test_lines_are_stamped_when_they_are_whole(tmp_path: Path) -> None:
    path, stamps = tmp_path / "log", Stamps()
    with stamps.of(path):
        with path.open("w") as log:
            log.write("server_")
            log.flush()
            time.sleep(0.05)
            between = time.monotonic()
            log.write("args=1\n")
            log.flush()
            wait_until(lambda: bool(stamps.seen), "the line", seconds=30)
        log_end = time.monotonic()
    assert between <= stamps.first("server_args=") <= log_end


def test_a_table_has_medians_and_the_whole() -> None:
    found = {one.name: one.value for one in figures([{"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 5.0}])}
    assert found == {"a": 2.0, "b": 5.0, "everything": 7.0}
