"""``rose dev``: the one-node Kubernetes for development and tests.

``build`` makes its parts, ``up`` and ``down`` start and end it, ``status`` shows it, ``kubectl``
speaks to it. See docs/development-cluster.md.
"""

from __future__ import annotations

import argparse
import sys

from rose_dev.build import build
from rose_dev.errors import DevelopmentError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rose dev", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("build", help="build the parts of Kubernetes into the user's cache")
    return parser


def main(argv: list[str]) -> int:
    """Run one verb of ``rose dev``.

    Returns:
        0 when done, 1 when it failed (the reason is on standard error).
    """
    _parser().parse_args(argv)
    try:
        build(say=lambda line: print(line, flush=True))
    except DevelopmentError as error:
        print(f"rose dev: {error}", file=sys.stderr)
        return 1
    return 0
