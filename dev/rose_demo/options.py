"""The knobs of ``rose demo``, and the kinds of engine that it can run.

What serves is always SGLang. Rollouts run on SGLang or on vLLM, borrowed and dedicated engines
alike: with two kinds side by side the bias meter would compare engines instead of lending.
Next step: ``manifests`` name a build.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rose_demo.calibrate import Objective
from rose_demo.pieces import Build
from rose_demo.records import Settings
from rose_demo.trace import BUSY_SHARE, default_trace
from rose_dev import engine_environment, vllm_environment
from rose_dev.environments import Environment
from rose_dev.models import RECIPES
from rose_wire.flags import above_zero, count, one_or_more, share


@dataclass(frozen=True)
class Kind:
    """A kind of engine, and where this machine has it.

    Attributes:
        engine_class: of the chart and of leases.
        title: for people.
        environment: that it runs in.
    """

    engine_class: str
    title: str
    environment: Environment

    def build(self) -> Build:
        """Where this machine has it, whether it is there already or not."""
        python = self.environment.python()
        return Build(self.engine_class, self.title, python, python.resolve().parents[1])


KINDS: Mapping[str, Kind] = {
    "sglang": Kind(
        "sglang-cpu", f"SGLang {engine_environment.SGLANG_VERSION}", engine_environment.ENGINE
    ),
    "vllm": Kind("vllm-cpu", f"vLLM {vllm_environment.VLLM_VERSION}", vllm_environment.ENGINE),
}
"""By what ``--rollout-engine`` takes."""
SERVING_KIND = KINDS["sglang"]


@dataclass(frozen=True)
class Options:
    """What a run is asked to do; see ``parser`` for the meanings."""

    seconds: float
    out: Path
    trace: Path
    load: float
    control_share: float
    serving_model: str
    rollout_model: str
    rollout_engine: str
    ttft_slo_ms: int | None
    tpot_slo_ms: int | None
    percentile: int
    window_seconds: float
    max_staleness: int
    publish_every: int
    plain: bool
    keep: bool

    def promise(self, measured: Objective) -> Objective:
        """The objective: as asked for, else as measured."""
        return Objective(self.ttft_slo_ms or measured.ttft_ms, self.tpot_slo_ms or measured.tpot_ms)

    def settings(self, promised: Objective) -> Settings:
        """The part that the report shows."""
        return Settings(
            seconds=self.seconds,
            ttft_slo_s=promised.ttft_ms / 1e3,
            tpot_slo_s=promised.tpot_ms / 1e3,
            percentile=self.percentile,
            window_s=self.window_seconds,
            trace=self.trace.name,
            serving_model=self.serving_model,
            rollout_model=self.rollout_model,
            rollout_engine=self.rollout_engine,
        )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="rose demo",
        description="Bring up a one-node Kubernetes with two serving replicas under live traffic, "
        "lend one of them to a GRPO trainer, and judge the three promises.",
        epilog="Exit code: 0 every promise kept, 1 one broken or unproven, 2 wrong usage or a "
        "part that did not come up. Needs root on Linux.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = result.add_argument
    models = sorted(RECIPES)
    add("--seconds", type=above_zero, default=240.0, help="length of the measurement")
    add("--out", type=Path, default=Path("out/demo"), help="folder of report and summary")
    add("--trace", type=Path, default=default_trace(), help="CSV with t_s,in_tokens,out_tokens")
    add(
        "--load",
        type=above_zero,
        metavar="SHARE",
        help="of the time for which a replica alone would be busy; the trace is thinned and "
        "shortened for it, by the speed that is measured here",
        default=BUSY_SHARE,
    )
    add(
        "--control-share",
        type=share,
        default=0.5,
        help="of the requests, sent to the never-lent replica too",
    )
    add("--serving-model", choices=models, default="mid", help="model of the serving replicas")
    add("--rollout-model", choices=models, default="tiny", help="model being trained")
    add(
        "--rollout-engine",
        choices=sorted(KINDS),
        default="sglang",
        help="stock engine of the slot and of the dedicated engine; what serves is SGLang either "
        "way. The environment of vLLM is made when it is asked for (6 GB)",
    )
    measured = "without, what a replica of the speed that is measured here can promise"
    add("--ttft-slo-ms", type=one_or_more, help=f"time to the first token; {measured}")
    add("--tpot-slo-ms", type=one_or_more, help=f"time per output token; {measured}")
    add(
        "--percentile",
        type=int,
        choices=range(50, 100),
        metavar="50..99",
        default=95,
        help="share of requests that must meet it",
    )
    add(
        "--window-seconds",
        type=above_zero,
        default=15.0,
        help="of lent and withheld windows; every two get the same load",
    )
    add("--max-staleness", type=count, default=3, help="publishes an engine may lag behind")
    add(
        "--publish-every",
        type=one_or_more,
        default=3,
        help="steps of the trainer per weight version",
    )
    add("--plain", action="store_true", help="no redrawing, for logs")
    add("--keep", action="store_true", help="leave the cluster running at the end")
    return result


def parse(argv: list[str]) -> Options:
    """Arguments as options."""
    return Options(**vars(parser().parse_args(argv)))
