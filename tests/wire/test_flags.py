"""Flags that several processes have."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from rose_wire import flags
from rose_wire.flags import complaint, listener, port


def test_a_port_is_a_number_that_a_port_can_be() -> None:
    assert (port("0"), port("65535")) == (0, 65535)
    for text in ("65536", "-1", "http", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is no port"):
            port(text)


def test_a_listener_has_a_host_and_a_port() -> None:
    assert listener("[::]:8000") == "[::]:8000"
    assert listener("unix:/run/s") == "unix:/run/s"
    for text in ("8000", ":8000", "host", "host:x"):
        with pytest.raises(argparse.ArgumentTypeError):
            listener(text)


def test_a_file_is_named_with_the_flag_that_named_it() -> None:
    missing = FileNotFoundError(2, "No such file or directory", "/etc/token")
    text = "/etc/token: No such file or directory"
    assert complaint(missing, ["--token-file", "/etc/token"]) == f"--token-file {text}"
    assert complaint(missing, ["--token-file=/etc/token"]) == f"--token-file {text}"
    assert complaint(missing, ["--folder", "/etc"]) == f"--folder {text}"
    assert complaint(missing, ["serve"]) == text
    assert complaint(ValueError("bad"), []) == "bad"


def test_a_target_has_a_host_and_a_port_or_a_path() -> None:
    for text in ("store:7446", "tls://store.example:7446", "unix:/run/s", "local:/run/s"):
        assert flags.target(text) == text
    for text in ("store", "7446", "tls://store", "tls://:1", "store:x", "unix:", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            flags.target(text)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (flags.count, {"0": 0, "12": 12}, ("-1", "x", "1.5", "")),
        (flags.amount, {"0": 0.0, "1.5": 1.5}, ("-1", "x", "nan", "inf", "")),
        (flags.above_zero, {"0.1": 0.1, "2": 2.0}, ("0", "-1", "x", "nan", "inf")),
        (flags.one_or_more, {"1": 1, "12": 12}, ("0", "-1", "1.5", "x")),
        (flags.share, {"0": 0.0, "1": 1.0}, ("-0.1", "1.1", "nan")),
    ],
)
def test_numbers_are_those_that_make_sense(
    kind: Callable[[str], float], good: dict[str, float], bad: tuple[str, ...]
) -> None:
    assert {text: kind(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="expected"):
            kind(text)


def test_an_empty_token_is_an_error_and_none_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "word").write_text("word\n")
    assert flags.token(None) == ""
    assert flags.token(tmp_path / "word") == "word"
    with pytest.raises(OSError, match="holds no token"):
        flags.token(tmp_path / "empty")
