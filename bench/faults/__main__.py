"""``python -m bench.faults``: every fault of guard, host, tap, serving and engine as a matrix.

Fake engines on real cgroups, namespaces and file systems; needs root. About five minutes on a
quiet machine. Exit code 1 when a case is not as it must be. ``bench.deaths`` has the same deaths
with real engines.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

from bench.faults.cases import CASES
from bench.faults.matrix import HEADER, CaseOutcome, run
from bench.record import Figure, figure, record

PROMISE_MS = 250.0


def figures(outcomes: list[CaseOutcome]) -> list[Figure]:
    """What was measured, case by case."""
    found = []
    for outcome in outcomes:
        if outcome.stopped_ms is not None:
            name = f"{outcome.case}: last token"
            found.append(figure(name, outcome.stopped_ms, "ms", at_most=PROMISE_MS))
        if outcome.recovered_s is not None:
            found.append(figure(f"{outcome.case}: back", outcome.recovered_s, "s"))
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the cases and print the matrix."""
    parser = argparse.ArgumentParser(prog="bench.faults", description=__doc__)
    parser.add_argument("--only", type=re.compile, default="", help="cases that match the pattern")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    options = parser.parse_args(argv)
    cases = [case for case in CASES if re.search(options.only, case.name)]
    if options.list:
        sys.stdout.write("".join(f"{case.name}\n" for case in cases))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="rose", dir="/tmp"))
    sys.stdout.write(f"{HEADER}\n")
    try:
        outcomes = run(folder, cases)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    bad = [outcome for outcome in outcomes if outcome.note]
    sys.stdout.write(f"{len(outcomes)} cases, {len(outcomes) - len(bad)} as they must be\n")
    notes = ["fake engines: the path of the stop, not a GPU", *(f"{b.case}: {b.note}" for b in bad)]
    record("faults", figures(outcomes), notes=notes)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
