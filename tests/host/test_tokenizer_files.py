"""What of a model's folder goes to routers, and what never does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rose_agent.host.route.tokenizer_files import tokenizer_frame


def test_a_folder_that_becomes_a_link_while_it_is_read_gives_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, secrets = tmp_path / "models" / "m", tmp_path / "secrets"
    for folder in (model / "real", secrets):
        folder.mkdir(parents=True)
        (folder / "token").write_text("{}")
    (model / "tokenizer.json").symlink_to("real/token")
    assert tokenizer_frame(tmp_path / "models", model)
    opening = os.open

    def swap(path: Path, flags: int) -> int:
        (model / "real").rename(model / "away")
        (model / "real").symlink_to(secrets)
        return opening(path, flags)

    monkeypatch.setattr(os, "open", swap)
    assert tokenizer_frame(tmp_path / "models", model) == b""
