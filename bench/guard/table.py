"""The table of all conditions side by side, for people."""

from __future__ import annotations

from bench.guard import analysis
from bench.guard.report import LATENCIES
from bench.guard.results import Results
from bench.guard.windows import WITHOUT
from rose_core.stats import quantile


def table(results: Results) -> str:
    """All conditions side by side."""
    lines = []
    for load in results.loads:
        alone = results.of(load, "alone")
        count = sum(len(w.measured) for w in alone)
        lines.append(f"{load}: {count} requests in {len(alone)} rounds, ms and ratio to alone")
        heads = "".join(f"{name:>18}" for name, *_ in LATENCIES)
        ends = f"{'rollout tok/s':>15}{'of idle':>9}{'in idle':>9}"
        lines.append(f"  {'':<12}{heads}{ends}  added [95 %] (new, spared)")
        lines += [_line(results, load, condition) for condition in results.conditions(load)]
    return "\n".join(lines) + "\n"


def _line(results: Results, load: str, condition: str) -> str:
    windows, alone = results.of(load, condition), results.of(load, "alone")
    cells = []
    for _, what, q, _ in LATENCIES:
        values = [value for window in windows for value in window.values(what)]
        found = analysis.ratio(analysis.pairs(alone, windows, what), q)
        value = f"{1e3 * quantile(values, q):.1f}" if values else "-"
        cells.append(f"{value:>10} {f'x{found.value:.2f}' if found else '':>7}")
    return f"  {condition:<12}{''.join(cells)}{_harvested(results, load, condition)}"


def _harvested(results: Results, load: str, condition: str) -> str:
    windows, alone = results.of(load, condition), results.of(load, "alone")
    solo, aims = results.solo.rollout_rate, results.aims(load)
    bursty = condition not in WITHOUT and aims is None
    shares = [kind(windows, alone, solo) for kind in (analysis.of_idle, analysis.in_idle)]
    cells = "".join(f"{f'{s.value:.2f}' if s and bursty else '':>9}" for s in shares)
    more = ""
    if aims is not None and condition != "alone":
        found = analysis.compared(windows, alone, aims)
        ends = f"[{found.net.low:.0f}, {found.net.high:.0f}]"
        more = f"  {found.net.value:.0f} {ends} ({found.fresh}, {found.spared})"
    return f"{analysis.harvest(windows):>15.0f}{cells}{more}"
