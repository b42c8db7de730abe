"""Flags that several processes have, and how a wrong one is told: what, where, what to do."""

from __future__ import annotations

import argparse
import datetime as dt
import errno
import ipaddress
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rose_core.identity import run_name

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_LARGEST_PORT = 65535
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


class HelpWithDefaults(argparse.HelpFormatter):
    """Help in which a flag's default stands, unless the flag has none or its text names it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        none = default is None or isinstance(default, (bool, list, tuple)) or not str(default)
        if none or not action.option_strings or action.nargs == 0 or "default" in text:
            return text
        return text + (" (default: %(default)s)" if default != argparse.SUPPRESS else "")


class VerbParser(argparse.ArgumentParser):
    """The parser of a verb, and by ``add_subparsers`` of those below it.

    Who runs a process by hand reads its flags with ``--help``, and the periods and ports that a
    page names are the defaults that stand there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # argparse's own
        kwargs.setdefault("formatter_class", HelpWithDefaults)
        super().__init__(*args, **kwargs)


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """Give a process its flag ``--log-level``."""
    parser.add_argument(
        "--log-level",
        default="INFO",
        type=str.upper,
        choices=LEVELS,
        help="least level of what is logged",
    )


def port(text: str) -> int:
    """A TCP port; 0 lets the system choose.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isascii() or not text.isdigit() or int(text) > _LARGEST_PORT:
        message = f"{text!r} is no port; expected 0 to {_LARGEST_PORT}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def count(text: str) -> int:
    """A number of things: whole, and not below zero.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isascii() or not text.isdigit():
        message = f"{text!r} is no count; expected a whole number, 0 or more"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def amount(text: str) -> float:
    """Seconds and the like: finite, and not below zero.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0.0 <= found < math.inf:
        message = f"{text!r} is no amount; expected a number, 0 or more"
        raise argparse.ArgumentTypeError(message)
    return found


def above_zero(text: str) -> float:
    """An amount that is not nothing.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    found = amount(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is too little; expected a number above 0")
    return found


def one_or_more(text: str) -> int:
    """A number of things that are there.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    found = count(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is too few; expected a whole number, 1 or more")
    return found


def share(text: str) -> float:
    """A part of a whole, 0 to 1.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    found = amount(text)
    if found > 1.0:
        message = f"{text!r} is no share; expected a number from 0 to 1"
        raise argparse.ArgumentTypeError(message)
    return found


def listener(text: str) -> str:
    """An address to listen on, ``host:port`` or ``unix:PATH``.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if text.removeprefix("unix:") not in {"", text}:
        return text
    host, _, number = text.rpartition(":")
    if not _is_host(host):
        message = f"{text!r} is no address to listen on; expected HOST:PORT, such as 0.0.0.0:8000"
        raise argparse.ArgumentTypeError(message)
    port(number)
    return text


def refuse_open(
    address: str,
    token_file: Path | None,
    otherwise: str,
    *,
    give: str = "--token-file",
) -> None:
    """Refuse to listen where others reach without asking them for a token.

    Args:
        address: as ``listener`` returns it.
        token_file: whose token callers must show; None = there is none.
        otherwise: what anybody could do then.
        give: flag of the tokens.

    Raises:
        ValueError: it is no address of this machine alone, and there is no token.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        here = False
    if not here and token_file is None:
        message = f"--address {address}: {otherwise}; give {give}"
        raise ValueError(message)


def target(text: str) -> str:
    """An address to dial: ``host:port``, ``tls://`` before it for TLS, or a socket's path.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    scheme, _, path = text.partition(":")
    if scheme in {"unix", "local"} and path:
        return text
    host, _, number = text.removeprefix("tls://").rpartition(":")
    if not _is_host(host):
        message = f"{text!r} is no address to dial; expected HOST:PORT or tls://HOST:PORT"
        raise argparse.ArgumentTypeError(message)
    port(number)
    return text


def web(text: str) -> str:
    """A web address, ``http://HOST:PORT`` or ``https://...``.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    message = f"{text!r} is no web address; expected http://HOST:PORT or https://HOST:PORT"
    try:
        found = urlsplit(text)
        found.port  # noqa: B018  # reading it checks it
    except ValueError as error:
        raise argparse.ArgumentTypeError(message) from error
    if found.scheme not in {"http", "https"} or not found.hostname:
        raise argparse.ArgumentTypeError(message)
    return text


def _is_host(text: str) -> bool:
    """A name or an address; brackets, as IPv6 has them, stand around all of it."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return bool(inner) and not set("[]/") & set(inner)


def lifetime(text: str) -> dt.timedelta | None:
    """How long a credential is good: ``90d``, ``12h``, ``30m``; None for ``never``.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if text == "never":
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,4})([mhd])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give 90d, 12h, 30m or never")
    return dt.timedelta(**{_UNITS[found[2]]: int(found[1])})


def run(text: str) -> str:
    """The name of a training run, for ``type=``.

    Raises:
        ArgumentTypeError: no run can have that name.
    """
    try:
        return run_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def token(path: Path | None) -> str:
    """The bearer token that a file holds; nothing without a file.

    Raises:
        OSError: the file cannot be read, or is empty, which must not open a door to everybody.
    """
    if path is None:
        return ""
    try:
        found = path.read_text().strip()
    except UnicodeDecodeError as error:
        reason = "holds no text; write the token into it as it is"
        raise OSError(errno.EINVAL, reason, str(path)) from error
    if not found:
        reason = "holds no token; write one into it, or leave the flag out"
        raise OSError(errno.EINVAL, reason, str(path))
    return found


def complaint(error: Exception, argv: Sequence[str]) -> str:
    """An error as one line; a file that could not be used is named with the flag that named it."""
    if not isinstance(error, OSError) or not error.filename:
        return str(error)
    name = str(error.filename)
    return f"{_flag_of(name, argv)}{name}: {error.strerror}"


def _flag_of(value: str, argv: Sequence[str]) -> str:
    for number, argument in enumerate(argv):
        flag, _, given = argument.partition("=")
        if not given and number + 1 < len(argv):
            given = argv[number + 1]
        if flag.startswith("--") and given and (value == given or value.startswith(f"{given}/")):
            return f"{flag} "
    return ""
