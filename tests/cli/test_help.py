"""``--help`` answers: every flag says what it is for and what it is when nobody sets it."""

from __future__ import annotations

import argparse

from tests.cli.parsers import every_parser


def shown(action: argparse.Action) -> str:
    return "/".join(action.option_strings) or str(action.metavar or action.dest)


def test_every_flag_and_argument_says_what_it_is_for() -> None:
    parsers = dict(every_parser())
    assert len(parsers) > 60
    silent = [
        f"rose {name}: {shown(action)}"
        for name, parser in parsers.items()
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert silent == []


def test_help_has_the_default_of_a_flag_that_has_one() -> None:
    parsers = dict(every_parser())
    said = " ".join(parsers["engine-host"].format_help().split())
    assert "--data-port" in said
    assert "(default: 30800)" in said
    silent = [
        f"rose {name}: {shown(action)}"
        for name, parser in parsers.items()
        if not name.startswith(("dev", "demo"))
        for action in parser._actions
        if action.option_strings
        and not isinstance(action.default, bool)
        and isinstance(action.default, (int, float))
        and action.default
        and "default" not in parser._get_formatter()._expand_help(action)
    ]
    assert silent == []
