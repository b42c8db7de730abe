"""An engine says by its own setting whether its log-probs are scaled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rose_core.rollouts.requests.logprobs import SCALE
from rose_engines.process.launch import Launch
from rose_engines.sglang.arguments import environment
from rose_engines.sglang.plugin import ORIGINAL_VARIABLE, LogprobHook


def reported_scale() -> str:
    meta: dict[str, Any] = {"id": "a"}
    LogprobHook().before_versions(meta, [], num_output_tokens=3)
    return str(meta[SCALE])


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", "original"), ("True", "original"), ("0", "temperature"), ("", "temperature")],
)
def test_it_says_what_its_sampler_does(
    value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ORIGINAL_VARIABLE, value)
    assert reported_scale() == expected


def test_without_the_variable_they_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ORIGINAL_VARIABLE, raising=False)
    assert reported_scale() == "temperature"


def test_an_engine_host_starts_all_its_engines_with_the_same_scale(tmp_path: Path) -> None:
    launch = Launch(python=tmp_path, model=tmp_path, port=1)
    assert ORIGINAL_VARIABLE not in environment(launch, {ORIGINAL_VARIABLE: "1"})
