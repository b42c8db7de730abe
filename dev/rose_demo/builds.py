"""The kinds of engine that the demo can run, and where this machine has them.

What serves is always SGLang. Rollouts run on SGLang or on vLLM, borrowed and dedicated engines
alike: with two kinds side by side the bias meter would compare engines instead of lending.
Next step: ``manifests`` name a build.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rose_demo.pieces import Build
from rose_dev import engine_environment, vllm_environment
from rose_dev.environments import Environment


@dataclass(frozen=True)
class Kind:
    """A kind of engine.

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
SERVING = KINDS["sglang"]
