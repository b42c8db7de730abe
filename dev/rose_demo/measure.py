"""The measurement: trainer and load run as processes, figures are collected, the table is drawn."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from rose_core.identity import published
from rose_demo import calibrate, cores
from rose_demo.collect import Collector, gate_intervals, stop_seconds
from rose_demo.errors import SetUpFailed
from rose_demo.load import burst, span_seconds
from rose_demo.options import Options
from rose_demo.pieces import DEDICATED, Engines
from rose_demo.reaper import Reaper
from rose_demo.records import Recording, Request, Sample
from rose_demo.spans import SpanRecord, most_eventful, since
from rose_demo.stack import Addresses, Stack
from rose_demo.table import Screen, frame
from rose_demo.trace import Scale
from rose_dev.image import checkout

_LOOK_SECONDS = 1.0
_PLACE_SECONDS = 10.0
_WARM_UP_SHARE = 0.25
_TRAINER_END_SECONDS = 90.0
_LENDING_SECONDS = 180.0
_EXPORT_SECONDS = 4.0  # routers of the demo export every second
# The load generator imports and plans before its first request is due.
_LOAD_START_SECONDS = 3.0
# Nice value. The load generator is what measures: a stamp that it takes late is latency that no
# request had.
_MEASURES = -10
# The trainer is told to stop at the end of the measurement; this only bounds a lost one.
_TRAINER_SPARE_SECONDS = 600.0


@contextmanager
def process(
    argv: list[str], log: Path, reaper: Reaper, *, nice: int = 0
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this ``nice`` value that ends with the block, and with the demo if killed."""
    with log.open("ab") as output:
        started = subprocess.Popen(
            argv, stdout=output, stderr=subprocess.STDOUT, cwd=checkout(), stdin=subprocess.DEVNULL
        )
    reaper.child(started.pid)
    os.setpriority(os.PRIO_PROCESS, started.pid, nice)
    cores.apply({started.pid: cores.Cores.REST}, cores.cores())
    try:
        yield started
    finally:
        if started.poll() is None:
            started.kill()
        started.wait()


def load_command(
    options: Options, scale: Scale, lent: str, control: str, out: Path, **changes: str
) -> list[str]:
    """The load generator's command line."""
    flags = {
        "lent": lent,
        "control": control,
        "trace": str(options.trace),
        "seconds": str(options.seconds),
        "keep": str(scale.keep),
        "shorter": str(scale.length_divisor / Scale.length_divisor),
        "control-share": str(options.control_share),
        "out": str(out),
    } | changes
    return [
        sys.executable,
        "-m",
        "rose_demo.load",
        *(f"--{name}={value}" for name, value in flags.items()),
    ]


def warm_up_command(stack: Stack, scale: Scale) -> list[str]:
    """Light traffic on both replicas: the guard trusts its signal once it has seen requests."""
    first, second = stack.serving_urls()
    light = replace(scale, keep=scale.keep * _WARM_UP_SHARE)
    changes = {"seconds": "900", "control-share": "1"}
    return load_command(stack.options, light, first, second, Path("/dev/null"), **changes)


def trainer_command(
    options: Options, at: Addresses, tokens: tuple[Path, Path], model: Path, out: Path
) -> list[str]:
    """The example trainer's command line: an RL team's own would look the same."""
    flags = {
        "url": at.router,
        "store": at.store,
        "token-file": tokens[0],
        "turn-token-file": tokens[1],
        "model": model,
        "seconds": options.seconds + _TRAINER_SPARE_SECONDS,
        "max-age": options.max_staleness,
        "publish-every": options.publish_every,
        "out": out,
    }
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-m", "examples.grpo.train", "--quiet", *arguments]


@dataclass
class Lines:
    """Follows a file of JSON lines that another process appends to."""

    path: Path
    _offset: int = 0

    def more(self) -> list[bytes]:
        """Whole lines written since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()


@dataclass
class Measurement:
    """Everything seen so far."""

    requests: list[Request] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)
    inclusion: dict[str, Any] = field(default_factory=dict)
    trajectory: tuple[SpanRecord, ...] = ()
    story: str = ""
    before_s: float = 0.0

    def read(self, load: Lines, progress: Lines) -> None:
        """Take in what load and trainer have written."""
        self.requests += [msgspec.json.decode(line, type=Request) for line in load.more()]
        self.training += [msgspec.json.decode(line) for line in progress.more()]


def fresh(folder: Path, *names: str) -> None:
    """Remove files of an earlier run from the output folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).unlink(missing_ok=True)


async def measure(stack: Stack, reaper: Reaper, screen: Screen) -> Recording:
    """Run trainer and load for the asked time and record everything."""
    at, out = stack.addresses(), stack.options.out
    fresh(out, "requests.jsonl", "progress.jsonl", "trainer.log", "load.log")
    model = stack.engines.models / stack.engines.rollout
    stack.place_processes()
    scale, title = await _calibrate(stack, at.lent)
    options = stack.options
    seen = Measurement()
    turns = stack.turn_token()
    trainer_argv = trainer_command(options, at, (stack.credential, turns), model, out)
    lines = (Lines(out / "requests.jsonl"), Lines(out / "progress.jsonl"))
    async with aiohttp.ClientSession() as session:
        collector = Collector(
            session,
            at.guard,
            at.router,
            options.window_seconds,
            time.monotonic(),
            stack.installation_token(),
            turns.read_text().strip(),
            at.traces,
        )
        # Totals count from before the trainer's first turn, so that they can be compared with its.
        seen.samples.append(msgspec.structs.replace(await collector.look(), at_s=0.0))
        counted_from = time.monotonic()
        with (
            cores.as_best_effort(stack.node.place.seat.cgroup) as join,
            process(trainer_argv, out / "trainer.log", reaper) as trainer,
        ):
            join(trainer.pid)
            await _until_published(stack, collector)
            await _until_paired(stack, scale, reaper, collector)
            seen.before_s = collector.origin - counted_from
            load = _measured_load(options, scale, at, collector)
            with process(load, out / "load.log", reaper, nice=_MEASURES):
                await _watch(stack, collector, seen, lines, screen)
            trainer.send_signal(signal.SIGTERM)
            await asyncio.to_thread(_end, trainer)
        seen.read(*lines)
        seen.samples.append(await collector.look())
        record = await collector.flight_record()
        seen.inclusion = await collector.inclusion()
        await asyncio.sleep(_EXPORT_SECONDS)  # a trajectory ends with the trainer's report of it
        epoch = time.time() - time.monotonic() + collector.origin
        seen.trajectory = since(most_eventful(await collector.spans()), epoch)
    (out / "flight-record.json").write_bytes(msgspec.json.encode(record))
    return _recording(stack, seen, record, int(collector.origin * 1e9), title)


async def _until_paired(stack: Stack, scale: Scale, reaper: Reaper, collector: Collector) -> None:
    """Light traffic until the slot lends; then until just before the next pair of windows."""
    options = stack.options
    light = warm_up_command(stack, scale)
    with process(light, options.out / "load.log", reaper, nice=_MEASURES):
        await _until_lending(stack, collector)
        collector.origin = next_pair(time.monotonic(), options.window_seconds)
        await asyncio.sleep(collector.origin - time.monotonic() - _LOAD_START_SECONDS)


def _measured_load(
    options: Options, scale: Scale, at: Addresses, collector: Collector
) -> list[str]:
    """The load of the measurement, which begins at the collector's origin."""
    return load_command(
        options,
        scale,
        at.lent,
        at.control,
        options.out / "requests.jsonl",
        origin=repr(collector.origin),
        **{"window-seconds": str(options.window_seconds)},
    )


def _recording(
    stack: Stack,
    seen: Measurement,
    record: list[dict[str, Any]],
    origin_ns: int,
    load: str,
) -> Recording:
    options = stack.options
    end_ns = origin_ns + int(options.seconds * 1e9)
    return Recording(
        settings=options.settings(stack.promised),
        requests=tuple(sorted(seen.requests, key=lambda request: request.at_s)),
        samples=tuple(seen.samples),
        gate=gate_intervals(record, origin_ns, end_ns) if record else (),
        stops_s=stop_seconds(record, origin_ns),
        training=tuple(seen.training),
        inclusion=seen.inclusion,
        trajectory=seen.trajectory,
        story=seen.story or stack.story(),
        before_s=seen.before_s,
        notes=notes(stack.engines) | {"load": load} | lateness(seen.requests),
    )


def next_pair(now_s: float, window_s: float) -> float:
    """When the next lent window begins that leaves the load generator time to start."""
    pair = 2 * window_s
    return math.ceil((now_s + _LOAD_START_SECONDS) / pair) * pair


async def _calibrate(stack: Stack, url: str) -> tuple[Scale, str]:
    """Fit load and objective to this machine; says how."""
    options = stack.options
    speed = await calibrate.measure_speed(url)
    span = span_seconds(options.seconds, options.window_seconds)
    unscaled = Scale(length_divisor=1.0, longest_prompt=sys.maxsize, longest_output=sys.maxsize)
    load = burst(options.trace, span, unscaled)
    scale = calibrate.fit(load, Scale(), speed, seconds=span, share=options.load)
    title = (
        f"live traffic: {scale.keep:.1%} of the trace's requests, lengths divided by "
        f"{scale.length_divisor:g}, for a replica busy {options.load:.0%} of the time: alone it "
        f"takes {speed.request_s * 1e3:.0f} ms a request, {speed.prefill_s * 1e3:.2f} ms a prompt "
        f"token, {speed.decode_s * 1e3:.0f} ms an output token"
    )
    stack.promise(calibrate.objective(scale, speed))
    title += f"; promised: TTFT {stack.promised.ttft_ms} ms, TPOT {stack.promised.tpot_ms} ms"
    stack.step(title)
    return scale, title


async def _until_published(stack: Stack, collector: Collector) -> None:
    """Wait until the dedicated engine carries the trainer's first weights, not its own checkpoint.

    Before live traffic: a trainer's start, and the first build of the weight plane's kernels, take
    whole cores for a while, which nobody's serving machine would have to spare.

    Raises:
        SetUpFailed: not in time.
    """
    await _until(
        stack,
        lambda seen: published(seen.versions.get(DEDICATED, "")) is not None,
        collector,
        "the dedicated engine carries the trainer's weights",
    )


async def _until_lending(stack: Stack, collector: Collector) -> None:
    """Wait until the borrowed engine carries the trainer's weights.

    Raises:
        SetUpFailed: not in time, or lending rests.
    """
    await _until(
        stack,
        lambda seen: seen.withheld is not None,
        collector,
        "the slot's engine carries the trainer's weights: measuring",
    )


async def _until(
    stack: Stack, condition: Callable[[Sample], bool], collector: Collector, what: str
) -> None:
    deadline = time.monotonic() + _LENDING_SECONDS
    while not condition(await collector.look()):
        if time.monotonic() > deadline:
            message = (
                f"{what}: not so after {_LENDING_SECONDS:.0f} s; see trainer.log and logs/ in "
                f"{stack.options.out}\n{stack.evidence()}"
            )
            raise SetUpFailed(message)
        await asyncio.to_thread(stack.refuse_to_rest)
        await asyncio.to_thread(stack.place_processes)
        await asyncio.sleep(2.0)
    stack.step(what)


async def _watch(
    stack: Stack,
    collector: Collector,
    seen: Measurement,
    lines: tuple[Lines, Lines],
    screen: Screen,
) -> None:
    settings, placed = stack.options.settings(stack.promised), 0.0
    await asyncio.sleep(max(collector.origin - time.monotonic(), 0.0))
    while (now := time.monotonic() - collector.origin) < settings.seconds:
        seen.samples.append(await collector.look())
        seen.read(*lines)
        screen.show(frame(settings, now, seen.requests, seen.samples, seen.training))
        if now - placed >= _PLACE_SECONDS:
            placed = now
            await asyncio.to_thread(stack.place_processes)
        if not seen.story and now > settings.seconds / 2:
            seen.story = await asyncio.to_thread(stack.story)
        pause = _LOOK_SECONDS - (time.monotonic() - collector.origin - now)
        await asyncio.sleep(max(pause, 0.05))


def _end(trainer: subprocess.Popen[bytes]) -> None:
    try:
        trainer.wait(_TRAINER_END_SECONDS)
    except subprocess.TimeoutExpired:
        trainer.kill()


def lateness(requests: Sequence[Request]) -> dict[str, str]:
    """How late the load generator was: what it adds to nobody's latency but should be small."""
    if not requests:
        return {}
    late = np.array([request.late_s for request in requests]) * 1e3
    text = f"p50 {np.quantile(late, 0.5):.1f} ms, p99 {np.quantile(late, 0.99):.1f} ms"
    return {"load generator behind its plan": text}


def notes(engines: Engines) -> dict[str, str]:
    """Facts of the machine and of the engines."""
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "serving engine": f"stock {engines.serving_build.title}",
        "rollout engine": f"stock {engines.rollout_build.title}",
        "python": platform.python_version(),
    }
