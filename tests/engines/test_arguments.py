"""Engine specification -> command line and environment."""

from collections.abc import Callable
from dataclasses import replace as replace_launch
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from rose_core.api.arguments import ALLOWED
from rose_core.guard.freezing import Grace
from rose_core.rollouts.engines.kv_store import KvPoolSpec
from rose_core.wire.sync import AdapterSpec, EngineSpec
from rose_engines.errors import ArgumentRefused
from rose_engines.kv.pool import POOL_VARIABLE
from rose_engines.process.launch import Launch, check_arguments
from rose_engines.sglang.arguments import command, environment, python_path
from rose_engines.sglang.launch import on_cpu
from rose_engines.vllm import arguments as vllm

LAUNCH = Launch(Path("/venv/bin/python"), Path("/models/m"), 4000, permit=Path("/r/permit"))


def spec(**arguments: str) -> EngineSpec:
    named = {name.replace("_", "-"): value for name, value in arguments.items()}
    return EngineSpec("sglang-cpu", "m", named, context_tokens=512, kv_tokens=2048, max_running=3)


def pairs(argv: list[str]) -> dict[str, str]:
    return {
        name: "" if value.startswith("--") else value
        for name, value in zip(argv, [*argv[1:], "--"], strict=True)
        if name.startswith("--")
    }


def test_an_engines_command_line_has_its_sizes_and_only_its_own_loopback_port() -> None:
    argv = command(spec(schedule_policy="fcfs"), LAUNCH)
    assert argv[:3] == ["/venv/bin/python", "-m", "rose_engines.sglang.launch"]
    flags = pairs(argv)
    assert flags["--max-total-tokens"] == "2048"
    assert flags["--max-running-requests"] == "3"
    assert flags["--context-length"] == "512"
    assert flags["--load-format"] == "safetensors"
    assert flags["--schedule-policy"] == "fcfs"
    assert flags["--host"] == "127.0.0.1"
    assert flags["--sleep-on-idle"] == ""
    assert int(flags["--watchdog-timeout"]) > 7 * 24 * 3600
    assert "--trust-remote-code" not in flags
    assert flags["--incremental-streaming-output"] == ""
    assert on_cpu(argv)
    assert not on_cpu(["--device", "cuda", "cpu"])


@pytest.mark.parametrize(
    ("context", "chunk"), [(16, 480), (4096, 416), (32768, 208), (131072, 64), (1 << 22, 16)]
)
def test_a_chunk_ends_in_time_also_after_a_long_context(context: int, chunk: int) -> None:
    asked = replace(spec(), context_tokens=context)
    assert pairs(command(asked, LAUNCH))["--chunked-prefill-size"] == str(chunk)
    smaller = replace(asked, arguments={"chunked-prefill-size": "32"})
    assert pairs(command(smaller, LAUNCH))["--chunked-prefill-size"] == "32"


@pytest.mark.parametrize("context", [512, 4096, 32768, 131072])
def test_a_chunk_over_several_gpus_ends_before_it_is_ended_with_its_engine(context: int) -> None:
    asked = replace(spec(), context_tokens=context)
    chunk = int(pairs(command(asked, replace_launch(LAUNCH, ranks=2)))["--chunked-prefill-size"])
    # Of the 8B on one H200 of decision 0199: 28 ms for 512 tokens after 2,048, 60 after 32,768.
    measured_ms = chunk / 512 * (28 + (60 - 28) * max(0, context - 2048) / (32768 - 2048))
    assert measured_ms < 0.9 * Grace().iteration_ns / 1e6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunked-prefill-size", "513"),
        ("trust-remote-code", ""),
        ("load-format", "pt"),
        ("model-path", "/elsewhere"),
        ("custom-weight-loader", "os.system"),
        ("mem-fraction-static", "0.99"),
        ("max-total-tokens", "999999999"),
        ("host", "0.0.0.0"),
        ("watchdog-timeout", "1"),
        ("--schedule-policy", "fcfs"),
        ("schedule-policy", "fcfs --trust-remote-code"),
        ("random-seed", "-1"),
        ("random-seed", "٣"),
        ("disable-radix-cache", "false"),
        ("reasoning-parser", "a b"),
        ("tp-size", "2"),
    ],
)
def test_refusal_names_the_argument(name: str, value: str) -> None:
    with pytest.raises(ArgumentRefused, match=name):
        check_arguments({name: value})


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_no_allowed_argument_takes_a_second_flag(name: str) -> None:
    with pytest.raises(ArgumentRefused):
        check_arguments({name: "x --y"})


@pytest.mark.parametrize("made_for", [environment, vllm.environment])
def test_environment_keeps_secrets_out(made_for: Callable[..., dict[str, str]]) -> None:
    secret = {"AWS_SECRET_ACCESS_KEY": "x", "KUBECONFIG": "y", "PYTHONDONTWRITEBYTECODE": "1"}
    strange = secret | {"SGLANG_X": "1", "VLLM_X": "1"}
    made = made_for(LAUNCH, strange | {"PATH": "/bin", "HOME": "/h"})
    assert made["PATH"] == "/bin"
    assert made["HOME"] == "/h"
    assert made["ROSE_PERMIT"] == "/r/permit"
    assert not made.keys() & {*strange, "ROSE_PLUGIN_SOCKET"}


def test_an_engine_with_a_permit_loads_roses_plugin() -> None:
    assert environment(LAUNCH, {})["SGLANG_PLUGINS"] == "rose"


def test_serving_engines_carry_no_plugin() -> None:
    launch = Launch(Path("/p"), Path("/m"), 1)
    made = environment(launch, {})
    assert made["SGLANG_PLUGINS"] == "none"
    assert not any("plugin" in str(path) for path in python_path(launch))


def test_plugin_is_visible_to_the_engine() -> None:
    """What is on PYTHONPATH declares the entry point that SGLang looks for."""
    found = [path for path in python_path(LAUNCH) if path.name == "plugin"]
    text = next(found[0].glob("*.dist-info/entry_points.txt")).read_text()
    assert "[sglang.srt.plugins]" in text
    assert "rose = rose_engines.sglang.plugin:register" in text


def test_an_adapter_bounds_sglangs_lora_and_is_told_to_the_plugin() -> None:
    adapter = AdapterSpec(8, ("q_proj", "v_proj"))
    launch = replace_launch(LAUNCH, adapter=adapter, plugin_socket=Path("/r/plugin"))
    argv = command(spec(), launch)
    assert argv[-3:] == ["--lora-target-modules", "q_proj", "v_proj"]
    found = pairs(argv)
    assert {name: found[name] for name in found if "lora" in name} == {
        "--enable-lora": "",
        "--max-lora-rank": "8",
        "--max-loras-per-batch": "2",
        "--lora-backend": "torch_native",
        "--lora-target-modules": "q_proj",
    }
    reported = environment(launch, {})["ROSE_ADAPTER"]
    assert msgspec.json.decode(reported, type=AdapterSpec) == adapter
    eight = replace_launch(launch, adapter=AdapterSpec(8, ("q_proj",), 8))
    assert pairs(command(spec(), eight))["--max-loras-per-batch"] == "9"
    on_gpu = command(spec(), replace_launch(launch, device="cuda"))
    assert "--lora-backend" not in on_gpu
    assert "--enable-lora" not in command(spec(), LAUNCH)
    assert "ROSE_ADAPTER" not in environment(LAUNCH, {"ROSE_ADAPTER": reported})


STORING = replace_launch(
    LAUNCH, plugin_socket=Path("/r/plugin.sock"), kv_store=Path("/keys/a"), kv_store_bytes=1 << 30
)


def test_an_engine_with_a_store_of_keys_has_pages_that_its_chunks_are_whole_of() -> None:
    asked = replace(spec(chunked_prefill_size="100"), context_tokens=512, kv_tokens=2048)
    flags = pairs(command(asked, STORING))
    assert (flags["--page-size"], flags["--chunked-prefill-size"]) == ("16", "96")
    assert flags["--hicache-ratio"] == "0.5"
    assert flags["--hicache-io-backend"] == "direct"
    backend = msgspec.json.decode(flags["--hicache-storage-backend-extra-config"])
    assert backend["module_path"] == "rose_engines.sglang.kv_backend"
    given = environment(STORING, {})
    assert given["ROSE_KV_STORE"] == "/keys/a"
    assert given["ROSE_KV_STORE_BYTES"] == str(1 << 30)
    assert "--enable-hierarchical-cache" not in pairs(command(asked, LAUNCH))
    assert "ROSE_KV_STORE" not in environment(LAUNCH, {"ROSE_KV_STORE": "/of/the/host"})


def test_an_engine_with_a_store_is_told_of_the_pool_and_one_without_is_not() -> None:
    pool = KvPoolSpec("m:1")
    told = msgspec.json.decode(
        environment(replace_launch(STORING, kv_pool=pool), {})[POOL_VARIABLE], type=KvPoolSpec
    )
    assert told == replace_launch(pool, python=str(STORING.python))
    assert POOL_VARIABLE not in environment(STORING, {POOL_VARIABLE: "of the host"})
    assert POOL_VARIABLE not in environment(replace_launch(LAUNCH, kv_pool=pool), {})


@pytest.mark.parametrize(
    "other",
    [
        replace_launch(STORING, ranks=2),
        replace_launch(STORING, adapter=AdapterSpec(8, ("q_proj",))),
        replace_launch(STORING, kv_policy="Reuse"),
        replace_launch(STORING, state_slots=4),
        replace_launch(STORING, window_permille=100),
    ],
)
def test_keys_of_engines_that_nobody_has_tried_are_refused(other: Launch) -> None:
    with pytest.raises(ArgumentRefused, match="kvStoreGiB needs"):
        command(spec(), other)
    with pytest.raises(ArgumentRefused, match="kvStoreGiB needs drafts: Off"):
        command(replace(spec(), drafts=True), STORING)


@pytest.mark.parametrize("name", ["enable-return-routed-experts", "disable-radix-cache"])
def test_no_store_of_keys_where_a_tokens_experts_are_asked_for_or_nothing_is_cached(
    name: str,
) -> None:
    asked = replace(spec(), arguments={name: ""})
    with pytest.raises(ArgumentRefused, match=f"kvStoreGiB cannot be combined .*{name}"):
        command(asked, STORING)
    command(asked, LAUNCH)


def test_an_engine_of_vllm_with_a_store_of_keys_is_refused() -> None:
    with pytest.raises(ArgumentRefused, match="kvStoreGiB"):
        vllm.command(replace(spec(), kv_store_bytes=1), LAUNCH)
