"""The one comparison by which listeners tell callers that bring the token."""

from __future__ import annotations

import pytest

from rose_wire.bearer import is_bearer


@pytest.mark.parametrize("header", ["Bearer word", "bearer word", "Bearer  word "])
def test_the_word_is_found_as_clients_write_it(header: str) -> None:
    assert is_bearer(header, "word")


@pytest.mark.parametrize(
    "header", ["", "word", "Basic word", "Bearer", "Bearer words", "Bearer wor"]
)
def test_anything_else_is_refused(header: str) -> None:
    assert not is_bearer(header, "word")


def test_bytes_that_are_no_text_are_refused_and_break_nothing() -> None:
    assert not is_bearer("Bearer \udcff", "word")
