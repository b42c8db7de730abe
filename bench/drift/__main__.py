"""Measure and report; see the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace

from bench.drift import answers
from bench.drift.trained import State, trained
from bench.record import Figure, figure, log, record
from rose_core.delta.probe import LIMIT, NOTICE, Answer, distance
from rose_dev.models import MID, TINY, Recipe

_WIDE = replace(MID, name="drift-wide", layers=12, hidden=384, intermediate=1024, heads=6)
MODELS: dict[str, tuple[Recipe, int]] = {
    "tiny": (replace(TINY, name="drift-tiny"), 400),
    "mid": (replace(MID, name="drift-mid"), 300),
    "wide": (_WIDE, 240),
}
"""Shape and number of training steps."""

NOTES = (
    "mean difference of the fixed prompt's log-probs, in nats, from the same weights in FP32",
    "models trained here on this repository's pages; no pretrained model can be had without a hub",
    "real engines are SGLang on CPU; no figure is of a GPU",
)


def model_figures(name: str, with_engines: bool) -> tuple[list[Figure], float, dict[str, float]]:
    """All figures of one model, the largest of right answers, and those of wrong ones."""
    recipe, steps = MODELS[name]
    before, state = trained(recipe, steps)
    truth = answers.reference(recipe, state)
    right = {what: distance(truth, found) for what, found in _right(recipe, state, with_engines)}
    wrong = {what: distance(truth, found) for what, found in answers.wrong(recipe, state, before)}
    found = [figure(f"{name}: largest logit", answers.largest_logit(recipe, state), "")]
    found += [
        figure(f"{name}: right: {what}", one, "nats", at_most=NOTICE) for what, one in right.items()
    ]
    found += [figure(f"{name}: wrong: {what}", one, "nats") for what, one in wrong.items()]
    return found, max(right.values()), wrong


def _right(recipe: Recipe, state: State, with_engines: bool) -> Iterator[tuple[str, Answer]]:
    yield from answers.right(recipe, state)
    if with_engines:
        for ranks in (1, 2):
            yield (
                f"SGLang, {ranks} rank{'s' * (ranks > 1)}",
                answers.engine_answer(recipe, state, ranks),
            )


def main(argv: list[str]) -> int:
    """Measure every model and print the table.

    Returns:
        0; an aim that was not met shows in the table.
    """
    parser = argparse.ArgumentParser(prog="bench.drift", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--no-engines", action="store_true", help="torch alone, without SGLang")
    arguments = parser.parse_args(argv)
    found: list[Figure] = []
    for name in arguments.models:
        log(name)
        figures, noise, wrong = model_figures(name, not arguments.no_engines)
        caught = sum(one > LIMIT for one in wrong.values())
        noticed = sum(one > NOTICE for one in wrong.values())
        found += [
            *figures,
            figure(f"{name}: largest of the right ones, of the limit", noise / LIMIT, ""),
            figure(f"{name}: wrong ones quarantined, of {len(wrong)}", caught, ""),
            figure(f"{name}: wrong ones that people are told of", noticed, ""),
        ]
    record("drift", found, notes=NOTES)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
