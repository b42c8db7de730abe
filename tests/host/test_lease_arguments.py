"""API, operator and engine host let the same engine arguments pass, and the sample's among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rose_agent.host.helper.rights import MODULES
from rose_agent.host.processes.classes import LAUNCHERS
from rose_agent.host.processes.launchers import EngineOrder
from rose_core.api import RolloutLease
from rose_core.api.arguments import ALLOWED, refusals
from rose_core.api.rolloutlease import LeaseSpec
from rose_core.rollouts.requests.fields import NOT_BY_SEED, NOT_IN_VLLM
from rose_core.wire.sync import EngineSpec
from rose_engines.errors import ArgumentRefused
from rose_engines.node.rundir import RunDir
from rose_engines.process.launch import Launch
from rose_engines.sglang.arguments import DRAFTS_VARIABLE, command

SAMPLE = Path(__file__).parents[2] / "crds" / "samples" / "rolloutlease.yaml"
LAUNCH = Launch(Path("/venv/bin/python"), Path("/models/m"), 4000)

VALUES = (
    *("", "true", "false", "0", "1", "0.5", "1.5", "64", "65536", "70000", "-1"),
    *("auto", "bfloat16", "float32", "fa3", "fa4", "fp8_e4m3", "lpm", "xgrammar", "none"),
    *("qwen3", "pytorch"),
)


def passes_host(arguments: dict[str, str]) -> bool:
    try:
        command(EngineSpec("sglang", "m", arguments), LAUNCH)
    except ArgumentRefused:
        return False
    return True


@pytest.mark.parametrize("name", [*ALLOWED, "page-size", "tp-size", "trust-remote-code"])
def test_what_the_operator_accepts_the_engine_host_starts_and_nothing_else(name: str) -> None:
    verdicts = {value: not refusals({name: value}) for value in VALUES}
    assert {value: passes_host({name: value}) for value in VALUES} == verdicts
    assert any(verdicts.values()) is (name in ALLOWED)


def test_the_api_server_knows_the_same_names() -> None:
    (rule,) = [one for one in LeaseSpec.rules if "engineArguments.all" in one.expression]
    assert all(f"'{name}'" in rule.expression for name in ALLOWED)
    assert rule.expression.count("'") == 2 * len(ALLOWED)


def test_the_host_starts_what_the_sample_lease_asks_for() -> None:
    lease = RolloutLease.model_validate(yaml.safe_load(SAMPLE.read_text()))
    assert lease.spec.engine_arguments
    assert passes_host(dict(lease.spec.engine_arguments))


@pytest.mark.parametrize(
    ("engine_class", "running", "arguments", "drafts"),
    [
        ("sglang-cpu", 8, {}, True),
        ("sglang-cpu", 64, {}, False),
        ("sglang-cpu", 8, {"chunked-prefill-size": "32"}, False),
        ("fake", 8, {}, False),
    ],
)
def test_a_host_says_whether_the_engine_drafts_and_not_whether_it_was_asked_to(
    tmp_path: Path, engine_class: str, running: int, arguments: dict[str, str], drafts: bool
) -> None:
    spec = EngineSpec(engine_class, "m", arguments, max_running=running, drafts=True)
    order = EngineOrder(spec, RunDir(tmp_path).slot("s"), tmp_path, Path("python"), 1)
    program = LAUNCHERS[engine_class](order)
    assert program.drafts is drafts
    assert ("--speculative-algorithm" in program.argv) is drafts
    assert (DRAFTS_VARIABLE in program.environment) is drafts


def test_the_root_helper_starts_what_a_host_composes_and_nothing_else(tmp_path: Path) -> None:
    """``sglang`` composes the program of ``sglang-cpu``, and needs a GPU for it."""
    order = EngineOrder(EngineSpec("", "m"), RunDir(tmp_path).slot("s"), tmp_path, Path("py"), 1)
    programs = [LAUNCHERS[name](order).argv for name in LAUNCHERS if name != "sglang"]
    assert {argv[:2] for argv in programs} == {("py", "-m")}
    assert {argv[2] for argv in programs} == MODULES


def test_a_host_says_which_parameters_an_engine_of_vllm_refuses(tmp_path: Path) -> None:
    spec = EngineSpec("", "m", context_tokens=1024, kv_tokens=1024, max_running=4)
    order = EngineOrder(spec, RunDir(tmp_path).slot("s"), tmp_path, Path("python"), 1)
    assert set(LAUNCHERS["vllm-cpu"](order).refuses) == NOT_IN_VLLM
    assert LAUNCHERS["sglang-cpu"](order).refuses == ()


def test_a_host_says_that_an_engine_which_samples_by_seed_takes_no_min_p(tmp_path: Path) -> None:
    spec = EngineSpec("", "m", {"enable-deterministic-inference": "true"})
    order = EngineOrder(spec, RunDir(tmp_path).slot("s"), tmp_path, Path("python"), 1)
    assert set(LAUNCHERS["sglang-cpu"](order).refuses) == NOT_BY_SEED == {"min_p"}
