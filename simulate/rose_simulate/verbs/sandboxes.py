"""``rose simulate sandboxes``: what saving agents' sandboxes costs them, and what suspending wins.

More and more agents live on one host, with waits and environment times of recorded turns. What is
saved when, and who is suspended, is decided by the functions that the host itself calls
(``model.sandboxes``); how long each takes was measured (``SAVING``).

| table | says |
|---|---|
| sandboxes of a host | how much of the saving agents feel, with an inspector and without |
| memory | how many sandboxes are in memory where not all of them fit, and what that costs |
| serving | the same where nothing may be saved for a part of the time |

Equal seeds give equal bytes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from rose_core.sandboxes.policy import BoundaryAction, SaveCosts
from rose_core.stats import quantile
from rose_simulate.files.reading import read_episodes
from rose_simulate.model.errors import SimulationError
from rose_simulate.model.jobs.workload import Episode
from rose_simulate.model.sandboxes.agents import AgentsSetting, live
from rose_simulate.model.sandboxes.host import HostSetting
from rose_simulate.verbs.studies import SCENARIOS
from rose_wire.flags import VerbParser, amount, count, share

SAVING = {
    BoundaryAction.NONE: 0.02,
    BoundaryAction.FILES: 0.73,
    BoundaryAction.PROCESSES: 0.34,
    BoundaryAction.FULL: 0.68,
    BoundaryAction.SUSPEND: 1.13,
}
"""Seconds of a boundary, from its place to its durable record: of 16 agents beside each other, the
larger median of two runs at a load of 8 to 28 (``python -m bench.sandboxes.waits``)."""
RESUMING = 0.36
"""Of the same runs."""
SHARES = (75.0, 66.0, 7.0, 12.0)
"""Of its turns: that changed nothing, files, processes, both."""
AGENTS = (16, 32, 64, 128, 256, 512)
ROOMS = (1.0, 0.9, 0.8, 0.7)
BURNS = (0.05, 0.2, 0.5)
MIDDLE = 64
"""Agents of the tables of memory and serving."""
NEVER = SaveCosts(suspend=math.inf, resume=math.inf)


class SandboxLevel(msgspec.Struct, frozen=True):
    """One number of agents on one host, over all seeds.

    Attributes:
        room: sandboxes that fit into memory, over all; 0: all fit, and nothing is said of it.
        burns: part of the time in which serving burns its budget.
        inspected: an inspector tells what turns changed.
        turns: that ended.
        held_share: of all other time of agents, for which replies were held.
        held_p99: seconds of one reply.
        late_share: of turns whose reply was let go before their record was durable.
        busy_share: of the host's places for saving.
        actions: boundaries by what they saved.
        resident_mean, resident_p99: sandboxes in memory, over all.
        over_share: part of the time in which more are in memory than there is room for.
    """

    agents: int
    room: float
    burns: float
    inspected: bool
    turns: int
    held_share: float
    held_p99: float
    late_share: float
    busy_share: float
    actions: dict[str, int]
    resident_mean: float
    resident_p99: float
    over_share: float


class SandboxStudy(msgspec.Struct, frozen=True):
    """What was asked, and the answers."""

    seconds: float
    seeds: tuple[int, ...]
    tokens_per_s: float
    shares: tuple[float, ...]
    saving: dict[str, float]
    resuming: float
    levels: tuple[SandboxLevel, ...]


def level(
    setting: AgentsSetting,
    host: HostSetting,
    episodes: Sequence[Episode],
    seeds: Sequence[int],
    seconds: float,
) -> SandboxLevel:
    """Let the agents live once for each seed."""
    found = [live(setting, host, episodes, seed, seconds) for seed in seeds]
    tallies = [one.tally for one in found]
    held = sorted(taken for one in tallies for taken in one.held_s)
    turns = len(held)
    resident: dict[int, int] = {}
    for one in tallies:
        for number, spent in one.resident_ns.items():
            resident[number] = resident.get(number, 0) + spent
    actions: dict[str, int] = {}
    for one in tallies:
        for action, times in one.actions.items():
            actions[action.value] = actions.get(action.value, 0) + times
    span = sum(resident.values())
    room = host.room if host.room is not None else float(setting.agents)
    return SandboxLevel(
        setting.agents,
        0.0 if host.room is None else host.room / setting.agents,
        host.burns_share,
        setting.inspected,
        turns,
        statistics.fmean(one.held_share for one in found),
        quantile(held, 0.99),
        sum(one.late for one in tallies) / turns,
        statistics.fmean(one.busy_share for one in found),
        dict(sorted(actions.items())),
        sum(number * spent for number, spent in resident.items()) / span / setting.agents,
        _weighted(resident, 0.99) / setting.agents,
        sum(spent for number, spent in resident.items() if number > room) / span,
    )


def _weighted(spent: dict[int, int], part: float) -> int:
    """The number below which the rest lies for that part of the time."""
    left = part * sum(spent.values())
    for number in sorted(spent):
        left -= spent[number]
        if left <= 0:
            return number
    return max(spent)


def tables(found: SandboxStudy) -> str:
    """In Markdown."""
    plain = [one for one in found.levels if not one.room and not one.burns]
    blind = {one.agents: one for one in plain if not one.inspected}
    lines = [
        "| sandboxes | replies held, of the time | p99 of one | let go unsaved | places busy "
        "| without an inspector: held | let go unsaved | places busy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in plain:
        if one.inspected:
            other = blind[one.agents]
            lines.append(
                f"| {one.agents} | {one.held_share:.3%} | {one.held_p99:.2f} s "
                f"| {one.late_share:.2%} | {one.busy_share:.0%} | {other.held_share:.3%} "
                f"| {other.late_share:.2%} | {other.busy_share:.0%} |"
            )
    lines += [
        "",
        "| sandboxes | fit into memory | in memory: mean, p99 | more than fit, of the time "
        "| boundaries that suspend | replies held, of the time | let go unsaved |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.agents} | {one.room * one.agents:.0f} "
        f"| {one.resident_mean * one.agents:.0f}, {one.resident_p99 * one.agents:.0f} "
        f"| {one.over_share:.1%} "
        f"| {one.actions.get('suspend', 0) / sum(one.actions.values()):.0%} "
        f"| {one.held_share:.2%} | {one.late_share:.2%} |"
        for one in found.levels
        if one.room
    ]
    lines += [
        "",
        "| sandboxes | serving burns, of the time | replies held, of the time | p99 of one "
        "| let go unsaved |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.agents} | {one.burns:.0%} | {one.held_share:.2%} | {one.held_p99:.2f} s "
        f"| {one.late_share:.1%} |"
        for one in found.levels
        if one.burns
    ]
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    """Arguments of the verb."""
    made = VerbParser(prog="rose simulate sandboxes", description=__doc__)
    add = made.add_argument
    add("--agents", type=count, nargs="+", default=list(AGENTS), help="on one host")
    add("--middle", type=count, default=MIDDLE, help="agents of the tables of memory and serving")
    add("--rooms", type=share, nargs="*", default=list(ROOMS), help="part of them that fits")
    add("--burns", type=share, nargs="*", default=list(BURNS), help="of the time, serving burns")
    add("--faster", type=float, default=1.0, help="than measured on a busy disk: saving, resuming")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the runs")
    add("--seconds", type=amount, default=3600.0, help="of virtual time, for each seed")
    add("--tokens-per-s", type=amount, default=40.0, help="of one reply")
    add(
        "--episodes",
        type=Path,
        default=SCENARIOS / "traces" / "weka_episodes_400.csv",
        help="recorded turns of agents",
    )
    add("--out", type=Path, default=Path("out") / "simulate", help="folder for what it writes")
    return made


def study(options: argparse.Namespace, episodes: Sequence[Episode]) -> SandboxStudy:
    """All levels."""
    saving = {action: seconds / options.faster for action, seconds in SAVING.items()}
    resuming = RESUMING / options.faster
    plain = HostSetting(saving, resuming, costs=NEVER)

    def one(agents: int, host: HostSetting, *, inspected: bool = True) -> SandboxLevel:
        sys.stderr.write(f"{agents} agents, room {host.room}, burns {host.burns_share}\n")
        setting = AgentsSetting(agents, 1 / options.tokens_per_s, SHARES, inspected)
        return level(setting, host, episodes, options.seeds, options.seconds)

    levels = [
        one(agents, plain, inspected=inspected)
        for agents in sorted(set(options.agents))
        for inspected in (True, False)
    ]
    hosts = [
        *(HostSetting(saving, resuming, room=room * options.middle) for room in options.rooms),
        *(replace(plain, burns_share=burns) for burns in options.burns),
    ]
    levels += [one(options.middle, host) for host in hosts]
    return SandboxStudy(
        options.seconds,
        tuple(options.seeds),
        options.tokens_per_s,
        SHARES,
        {action.value: seconds for action, seconds in saving.items()},
        resuming,
        tuple(levels),
    )


def main(argv: list[str]) -> int:
    """Run the verb."""
    options = parser().parse_args(argv)
    if options.faster <= 0:
        sys.stderr.write("rose simulate sandboxes: --faster must be above 0\n")
        return 2
    try:
        episodes = read_episodes(options.episodes)
    except SimulationError as error:
        sys.stderr.write(f"rose simulate sandboxes: {error}\n")
        return 1
    found = study(options, episodes)
    options.out.mkdir(parents=True, exist_ok=True)
    path: Path = options.out / "sandboxes.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    sys.stdout.write(f"{tables(found)}\nwritten to {path}\n")
    return 0
