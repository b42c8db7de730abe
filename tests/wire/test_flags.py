"""Flags that several processes have."""

import argparse

import pytest

from rose_wire.flags import complaint, listener, port


def test_a_port_is_a_number_that_a_port_can_be() -> None:
    assert (port("0"), port("65535")) == (0, 65535)
    for text in ("65536", "-1", "http", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is no port"):
            port(text)


def test_a_listener_has_a_host_and_a_port() -> None:
    assert listener("[::]:8000") == "[::]:8000"
    for text in ("8000", ":8000", "host", "host:x"):
        with pytest.raises(argparse.ArgumentTypeError):
            listener(text)


def test_a_file_is_named_with_the_flag_that_named_it() -> None:
    missing = FileNotFoundError(2, "No such file or directory", "/etc/token")
    told = "/etc/token: No such file or directory"
    assert complaint(missing, ["--token-file", "/etc/token"]) == f"--token-file {told}"
    assert complaint(missing, ["--token-file=/etc/token"]) == f"--token-file {told}"
    assert complaint(missing, ["--folder", "/etc"]) == f"--folder {told}"
    assert complaint(missing, ["serve"]) == told
    assert complaint(ValueError("bad"), []) == "bad"
