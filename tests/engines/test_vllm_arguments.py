"""Engine specification -> command line and environment of vLLM."""

from __future__ import annotations

from dataclasses import replace as replace_launch
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rose_core.api.arguments import ALLOWED
from rose_core.wire.sync import AdapterSpec, EngineSpec, Sharing
from rose_engines.errors import ArgumentRefused
from rose_engines.vllm.arguments import command, environment
from tests.engines.test_arguments import LAUNCH, pairs

SPEC = EngineSpec("vllm-cpu", "m", context_tokens=512, kv_tokens=2048, max_running=3)


def test_the_command_line_has_the_leases_sizes_and_what_the_promises_rest_on() -> None:
    argv = command(replace(SPEC, arguments={"random-seed": "3"}), LAUNCH)
    assert argv[:3] == ["/venv/bin/python", "-m", "rose_engines.vllm.launch"]
    flags = pairs(argv)
    assert flags["--host"] == "127.0.0.1"
    assert flags["--max-model-len"] == "512"
    assert flags["--max-num-seqs"] == "3"
    # One block more, which vLLM keeps for itself.
    assert int(flags["--num-gpu-blocks-override"]) * int(flags["--block-size"]) == 2048 + 128
    assert flags["--load-format"] == "safetensors"
    assert flags["--distributed-executor-backend"] == "uni"
    assert flags["--logprobs-mode"] == "processed_logprobs"
    assert flags["--seed"] == "3"
    assert {"--no-async-scheduling", "--enforce-eager"} <= flags.keys()
    assert "--trust-remote-code" not in flags


def test_a_chunk_is_what_it_is_for_sglang_or_what_the_lease_says() -> None:
    assert pairs(command(SPEC, LAUNCH))["--max-num-batched-tokens"] == "480"
    smaller = replace(SPEC, arguments={"chunked-prefill-size": "32"})
    assert pairs(command(smaller, LAUNCH))["--max-num-batched-tokens"] == "32"


def test_arguments_of_sglang_alone_are_refused_by_name() -> None:
    taken = []
    for name in ALLOWED:
        try:
            command(replace(SPEC, arguments={name: _a_value(name)}), LAUNCH)
            taken.append(name)
        except ArgumentRefused as refused:
            assert name in str(refused)  # noqa: PT017  # either is right
    assert sorted(taken) == [
        "chunked-prefill-size",
        "disable-radix-cache",
        "dtype",
        "random-seed",
        "stream-interval",
    ]


def _a_value(name: str) -> str:
    values = ("", "64", "auto", "fcfs", "none", "triton", "pytorch", "0.5", "qwen3")
    return next(value for value in values if ALLOWED[name].check(value))


@pytest.mark.parametrize(
    ("what", "spec", "launch"),
    [
        ("GPU", {}, {"device": "cuda"}),
        ("gpusPerSlot", {}, {"ranks": 2}),
        ("adapters", {}, {"adapter": AdapterSpec(8, ("q_proj",))}),
        ("drafts", {"drafts": True}, {}),
        ("Elastic", {"sharing": Sharing(memory_source="Elastic")}, {}),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    what: str, spec: dict[str, Any], launch: dict[str, Any]
) -> None:
    with pytest.raises(ArgumentRefused, match=what):
        command(replace(SPEC, **spec), replace_launch(LAUNCH, **launch))


def test_it_loads_roses_plugin_alone() -> None:
    assert environment(LAUNCH, {})["VLLM_PLUGINS"] == "rose"
    assert environment(LAUNCH, {})["TORCH_COMPILE_DISABLE"] == "1"


def test_the_plugin_is_visible_to_vllm() -> None:
    """What is on PYTHONPATH declares the entry points that vLLM looks for."""
    first = Path(environment(LAUNCH, {})["PYTHONPATH"].split(":")[0])
    text = next(first.glob("*.dist-info/entry_points.txt")).read_text()
    assert "[vllm.general_plugins]\nrose = rose_engines.vllm.plugin:register" in text
    assert "[vllm.endpoint_plugins]\nrose = rose_engines.vllm.turns:TurnRoutes" in text
