"""``python -m bench.startup``: where an engine's start-up time goes, part by part, on real SGLang.

From the first process to the first attested version, on a CPU. The parts are told apart by lines of
the engine's log, each stamped when it arrives, so nothing in the engine is changed for it:

| part | ends with |
|---|---|
| process and imports of the server | its arguments are logged |
| process and imports of the scheduler | it begins with its ranks |
| ranks, model's classes | it begins to load weights |
| loading the weights | it has |
| KV pool | it is there |
| caches, graphs, first iteration | the plugin begins to learn the layout |
| layout of the weights | it is known |
| HTTP server, warm-up | the engine answers as ready |
| first version staged | the bundle is beside the live weights |
| first version committed and attested | the digest of the live weights is the publisher's |

On a GPU kernels that are not cached are compiled in between (docs/engine-image.md); a CPU has none.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.record import Figure, figure, log, record
from rose_core.identity import WeightVersion
from rose_dev.engine_testing import RealEngine, start_engine, state_of, write_bundle
from rose_dev.errors import StartFailed
from rose_dev.models import RECIPES
from rose_engines.weights.control import ControlClient

# Part, and what stands in the line of the log that ends it.
PARTS = (
    ("process and imports of the server", "server_args="),
    ("process and imports of the scheduler", "Init parallel begin"),
    ("ranks, model's classes", "Load weight begin"),
    ("loading the weights", "Load weight end"),
    ("KV pool", "Memory pool end"),
    ("caches, graphs, first iteration", "rose: learning where the weights are"),
    ("layout of the weights", "rose: layout known"),
)
READY = "HTTP server, warm-up"
STAGED = "first version staged"
ATTESTED = "first version committed and attested"
_LOOK_SECONDS = 0.002


@dataclass
class Stamps:
    """When lines arrived in a growing file, seconds of the monotonic clock.

    Attributes:
        seen: line and time, in the order of the file.
    """

    seen: list[tuple[str, float]] = field(default_factory=list)

    @contextmanager
    def of(self, path: Path) -> Iterator[None]:
        """Follow the file while the block runs; it need not be there yet."""
        ended = threading.Event()
        thread = threading.Thread(target=self._follow, args=(path, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _follow(self, path: Path, ended: threading.Event) -> None:
        while not path.exists():
            if ended.wait(_LOOK_SECONDS):
                return
        with path.open(errors="replace") as file:
            begun = ""
            while True:
                last = ended.is_set()
                for line in file:
                    begun += line
                    if begun.endswith("\n"):
                        self.seen.append((begun, time.monotonic()))
                        begun = ""
                if last:
                    return
                ended.wait(_LOOK_SECONDS)

    def first(self, text: str) -> float:
        """When a line with this text came first.

        Raises:
            StartFailed: none did; this SGLang words it otherwise.
        """
        found = next((at for line, at in self.seen if text in line), None)
        if found is None:
            raise StartFailed(f"no line of the engine's log has {text!r}; it knows other words")
        return found


def parts(stamps: Stamps, started: float, ready: float) -> dict[str, float]:
    """Seconds of each part until the engine was ready; their sum is the whole.

    Raises:
        StartFailed: a line that ends a part is missing.
    """
    found, before = {}, started
    for name, text in PARTS:
        at = stamps.first(text)
        found[name] = at - before
        before = at
    return {**found, READY: ready - before}


async def first_version(
    engine: RealEngine, bundle: Path, version: WeightVersion, digest: str
) -> dict[str, float]:
    """Stage, commit and attest the first version.

    Raises:
        StartFailed: the digest of the live weights is not the publisher's.
    """
    began = time.monotonic()
    async with await ControlClient.connect(engine.control) as control:
        await control.stage(bundle)
        staged = time.monotonic()
        await control.commit(str(version))
        attested = await control.attest()
    if attested.digest != digest:
        raise StartFailed(f"the engine attests {attested.digest}, the publisher {digest}")
    return {STAGED: staged - began, ATTESTED: time.monotonic() - staged}


def once(model: str) -> dict[str, float]:
    """One start, part by part, seconds."""
    stamps = Stamps()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = folder / "bundle"
        version = WeightVersion("bench", int(time.time()), 0)
        manifest = write_bundle(bundle, version, state_of(RECIPES[model]))
        started = time.monotonic()
        with stamps.of(folder / "engine.log"), start_engine(folder, model) as engine:
            ready = time.monotonic()
            first = asyncio.run(first_version(engine, bundle, version, manifest.digest))
    return {**parts(stamps, started, ready), **first}


def figures(starts: Sequence[dict[str, float]]) -> list[Figure]:
    """The median of each part and of the whole."""
    found = [
        figure(name, statistics.median(one[name] for one in starts), "s") for name in starts[0]
    ]
    whole = statistics.median(sum(one.values()) for one in starts)
    return [*found, figure("everything", whole, "s")]


def main(argv: list[str] | None = None) -> int:
    """Start engines one after another and print the table."""
    parser = argparse.ArgumentParser(prog="bench.startup", description=__doc__)
    parser.add_argument("--model", default="mid-peaked", choices=sorted(RECIPES))
    parser.add_argument("--starts", type=int, default=3)
    arguments = parser.parse_args(argv)
    measured = []
    for number in range(arguments.starts):
        log(f"start {number + 1} of {arguments.starts}")
        measured.append(once(arguments.model))
    notes = (f"model {arguments.model}, {arguments.starts} starts, medians, SGLang on CPU",)
    record("startup", figures(measured), notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
