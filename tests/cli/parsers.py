"""Parsers of the command's verbs, as each makes its own: nothing is parsed, and nothing runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import cache

import pytest

from rose_agent.guard.inspection.node_verbs import LOOKS
from rose_cli.main import SUBVERBS, VERBS, main
from rose_simulate.main import OTHERS

Words = tuple[str, ...]


class _Made(BaseException):
    """A verb's parser, at the moment at which it would begin to parse."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


@cache
def _made(words: Words) -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser.parse_known_args

    def capture(
        self: argparse.ArgumentParser,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        if not self.add_help:  # the operator's first look at its flags; its real parser comes after
            return whole(self, args, namespace)
        raise _Made(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", capture)
        try:
            main(list(words))
        except _Made as made:
            return made.parser
    raise AssertionError(f"rose {' '.join(words)} parses nothing")


def below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """A parser's verbs of its own, as ``grant`` of ``rose tenant``."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def parser_of(words: Words) -> argparse.ArgumentParser:
    """The parser for what follows these words; the first is a verb."""
    apart = len(words) > 1 and (
        words[:2] in SUBVERBS
        or (words[0] == "agent" and words[1] in LOOKS)
        or (words[0] == "simulate" and words[1] in OTHERS)
    )
    parser = _made(words[: 2 if apart else 1])
    for word in words[1:]:
        if word not in below(parser):
            break
        parser = below(parser)[word]
    return parser


def every_parser() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each parser of the command, with the words that lead to it."""
    first: list[Words] = [
        *((verb,) for verb in VERBS),
        *SUBVERBS,
        *(("agent", word) for word in LOOKS),
        *(("simulate", word) for word in OTHERS),
    ]
    for words in first:
        yield from _with_below(" ".join(words), parser_of(words))


def _with_below(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for word, one in below(parser).items():
        yield from _with_below(f"{name} {word}", one)
