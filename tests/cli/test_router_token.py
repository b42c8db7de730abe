"""``rose router token``: the words of a lease, none of which says anything of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose_batches import main as batches
from rose_cli.ops import router_token
from rose_trainer.adapters import ingest
from rose_wire.bearer import BATCHES, INGEST, lease_token, service_token


def test_its_help_names_the_flag_that_each_service_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        router_token.main(["--help"])
    output = " ".join(capsys.readouterr().out.split())
    for verb, flag, flags in (
        ("batches", "--token-file", batches.parser()),
        ("ingest", "--caller-token-file", ingest.parser()),
    ):
        assert f"`rose {verb} {flag}`" in output
        assert flag in flags.format_help()


def test_each_use_of_a_lease_has_a_word_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("installation\n")
    received = []
    for lease in ("team/one", "team/two"):
        for more in ([], ["--for", "batches"], ["--for", "ingest"]):
            assert not router_token.main(["--lease", lease, "--token-file", str(token), *more])
            received.append(capsys.readouterr().out.strip())
    wanted = [
        word("installation", lease)
        for lease in ("team/one", "team/two")
        for word in (
            lease_token,
            lambda token, lease: service_token(token, lease, BATCHES),
            lambda token, lease: service_token(token, lease, INGEST),
        )
    ]
    assert received == wanted
    assert len(set(received)) == 6
