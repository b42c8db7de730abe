"""MPS: what must be true before a GPU is shared, and the daemon's grammar on the stand-in.

``test_real_mps`` holds NVIDIA's own daemons to the same contract.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rose_agent.devices.mps import control3 as mps3
from rose_agent.devices.mps import fake as fake_mps
from rose_agent.devices.mps.asking import PROGRAM, send
from rose_agent.devices.mps.control import MpsControl, Pipes
from rose_agent.devices.mps.main import Question, check, end, main
from rose_agent.errors import MpsError
from rose_agent.os.groups import wait_for
from rose_core.devices.mps import (
    EndStep,
    MpsClient,
    MpsRefusal,
    MpsSeen,
    MpsServer,
    ServerState,
    client_environment,
    expected_multiprocessors,
    is_limited,
    may_share,
    next_end_step,
)
from rose_dev.process_testing import CLI, start_process

# An answer is a new process of the stand-in: on a busy machine that takes seconds, and a daemon
# that is late counts as none.
PATIENCE = 120.0
SERVER = MpsServer(100, ServerState.ACTIVE, 0, frozenset({11, 22}), multi_user=True)
SEEN = MpsSeen((SERVER,), frozenset({11}))


def test_a_gpu_whose_owner_opted_in_may_be_shared() -> None:
    assert may_share(SEEN, 20_000).server == SERVER


@pytest.mark.parametrize(
    ("seen", "refusal"),
    [
        (replace(SEEN, servers=None), MpsRefusal.UNAVAILABLE),
        (replace(SEEN, servers=(replace(SERVER, state=ServerState.FAULT),)), MpsRefusal.FAULT),
        (replace(SEEN, serving_pids=frozenset({33})), MpsRefusal.SERVING_OUTSIDE),
        (replace(SEEN, servers=()), MpsRefusal.SERVING_OUTSIDE),
        (replace(SEEN, servers=(replace(SERVER, multi_user=False),)), MpsRefusal.WRONG_USER),
        (replace(SEEN, servers=(replace(SERVER, multi_user=None),)), MpsRefusal.WRONG_USER),
    ],
)
def test_each_missing_condition_is_refused_by_name(seen: MpsSeen, refusal: MpsRefusal) -> None:
    found = may_share(seen, 20_000)
    assert found.refusal is refusal
    assert found.message


def test_a_server_of_the_engines_own_user_needs_no_multi_user_mode() -> None:
    own = replace(SERVER, uid=20_000, multi_user=None)
    assert may_share(replace(SEEN, servers=(own,)), 20_000).server == own


def test_an_engine_outside_the_server_is_refused_however_little_it_sees() -> None:
    found = is_limited(MpsClient(frozenset({33}), 10), SERVER, 132, 30)
    assert found.refusal is MpsRefusal.NOT_A_CLIENT


@pytest.mark.parametrize(("seen", "given"), [(40, True), (38, True), (41, False), (132, False)])
def test_an_engine_sees_its_share_and_no_more(seen: int, given: bool) -> None:
    found = is_limited(MpsClient(frozenset({22}), seen), SERVER, 132, 30)
    assert (found.refusal is MpsRefusal.NONE) is given


def test_an_engine_that_does_not_say_what_it_sees_is_not_believed() -> None:
    found = is_limited(MpsClient(frozenset({22}), None), SERVER, 132, 30)
    assert found.refusal is MpsRefusal.SHARE_NOT_GIVEN


def test_a_share_of_an_unknown_whole_is_not_believed() -> None:
    found = is_limited(MpsClient(frozenset({22}), 10), SERVER, None, 30)
    assert found.refusal is MpsRefusal.SHARE_NOT_GIVEN


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_server_of_one_user_takes_no_other_users_process() -> None:
    daemon = fake_mps.FakeDaemon(multi_user=False)
    assert daemon.answer(f"fake_connect {os.getpid()}") == ""
    other = subprocess.Popen(["/bin/sleep", "600"], user=42_000, group=42_000, extra_groups=[])
    try:
        assert "server is user 0" in daemon.answer(f"fake_connect {other.pid}")
    finally:
        other.kill()
        other.wait()


def test_shares_are_rounded_up_to_pairs_and_never_above_the_gpu() -> None:
    assert [expected_multiprocessors(132, share) for share in (20, 30, 50, 100)] == [
        28,
        40,
        66,
        132,
    ]


def test_a_clients_environment_limits_it_and_puts_it_behind_serving() -> None:
    made = client_environment("/pipe", "/log", 30)
    assert made["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
    assert made["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    assert made["CUDA_MPS_PIPE_DIRECTORY"] == "/pipe"


def test_a_client_is_terminated_before_it_is_killed() -> None:
    assert next_end_step(listed=True, ordered=False, waited_s=0.0) is EndStep.TERMINATE
    assert next_end_step(listed=True, ordered=True, waited_s=1.0) is EndStep.WAIT
    assert next_end_step(listed=False, ordered=True, waited_s=1.0) is EndStep.KILL
    assert next_end_step(listed=True, ordered=True, waited_s=2.0) is EndStep.KILL


# --- the daemon's grammar


class Daemon:
    """A control daemon, and what stands for processes that use the GPU."""

    def __init__(self, control: MpsControl, connect: Callable[[str], object]) -> None:
        self.control = control
        self.command_daemon = connect


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    folder = Path(tempfile.mkdtemp(prefix="mps", dir="/tmp"))
    yield Pipes(folder).create()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=[2, 3])
def daemon(pipes: Pipes, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """The stand-in, run as ``rose mps`` runs it, in both grammars."""
    program = [*PROGRAM]
    words = ["mps", "--root", str(pipes.root), "--program", " ".join(program)]
    words += ["--protocol", str(request.param), "--answer-seconds", str(PATIENCE)]
    process = start_process(CLI, *words)
    place = pipes.pipe / "control"
    try:
        assert wait_for(place.exists, 30.0)
        yield Daemon(MpsControl(pipes, program, PATIENCE), lambda line: send(place, line))
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not place.exists()


def test_clients_and_their_end(daemon: Daemon) -> None:
    control = daemon.control
    assert control.servers() == ()
    daemon.command_daemon("fake_connect 4711 30")
    daemon.command_daemon("fake_connect 4712")
    (server,) = control.servers()
    assert (server.state, server.clients) == (ServerState.ACTIVE, frozenset({4711, 4712}))
    assert server.uid == os.geteuid()
    assert server.multi_user is (os.geteuid() == 0)
    control.terminate(server.pid, 4711)
    assert control.servers()[0].clients == frozenset({4712})
    with pytest.raises(MpsError, match="Failed to terminate"):
        control.terminate(server.pid, 4711)


def test_a_fault_lasts_until_every_client_has_left(daemon: Daemon) -> None:
    daemon.command_daemon("fake_connect 4711")
    daemon.command_daemon("fake_fault")
    (server,) = daemon.control.servers()
    assert server.state is ServerState.FAULT
    seen = MpsSeen((server,), frozenset({4711}))
    assert may_share(seen, 0).refusal is MpsRefusal.FAULT
    daemon.command_daemon("fake_leave 4711")
    assert daemon.control.servers()[0].state is ServerState.ACTIVE


def test_a_check_asks_the_daemon_and_says_the_first_thing_that_is_wrong(daemon: Daemon) -> None:
    def asked(question: Question) -> MpsRefusal:
        return check(daemon.control, question).refusal

    serving = Question(serving=4711, engine_uid=os.geteuid())
    assert asked(serving) is MpsRefusal.SERVING_OUTSIDE
    daemon.command_daemon("fake_connect 4711")
    assert asked(serving) is MpsRefusal.NONE
    engine = replace(serving, client=4712, seen=40, whole=132)
    assert asked(engine) is MpsRefusal.NOT_A_CLIENT
    daemon.command_daemon("fake_connect 4712 30")
    assert asked(engine) is MpsRefusal.NONE
    assert asked(replace(engine, seen=132)) is MpsRefusal.SHARE_NOT_GIVEN


def test_the_verb_says_what_is_missing_and_then_that_nothing_is(
    daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    root = daemon.control._pipes.root  # where the fixture put it
    flags = ["--root", str(root), "--check", "--serving", "4711"]
    flags += ["--program", " ".join(PROGRAM)]
    flags += ["--answer-seconds", str(PATIENCE), "--engine-uid", str(os.geteuid())]
    assert main(flags) == 1
    assert capsys.readouterr().out.startswith("MpsServingOutside: ")
    daemon.command_daemon("fake_connect 4711")
    assert main(flags) == 0
    assert capsys.readouterr().out == "ok\n"


def test_a_client_loses_its_server_before_it_is_killed(daemon: Daemon) -> None:
    engine = subprocess.Popen(["/bin/sleep", "600"])
    try:
        daemon.command_daemon(f"fake_connect {engine.pid}")
        assert end(daemon.control, engine.pid)
        assert daemon.control.servers()[0].clients == frozenset()
        assert engine.wait(30) == -signal.SIGKILL
    finally:
        engine.kill()
        engine.wait()


def test_the_protocol_is_the_daemons(daemon: Daemon, request: pytest.FixtureRequest) -> None:
    assert f"[{daemon.control.protocol}]" in request.node.name


@pytest.mark.parametrize(
    ("words", "environment", "speaks"),
    [
        (("nvidia-cuda-mps-control", "-d"), (), False),
        (("nvidia-cuda-mps-control", "-d", "-p", "3"), (), True),
        (("nvidia-cuda-mps-control", "--protocol=3", "-f"), (), True),
        (("nvidia-cuda-mps-control", "-p", "2"), ("CUDA_MPS_PROTOCOL_VERSION=3",), True),
        (("nvidia-cuda-mps-control", "-p", "3"), ("CUDA_MPS_PROTOCOL_VERSION=2",), False),
    ],
)
def test_a_daemons_protocol_shows_in_how_it_was_started(
    words: tuple[str, ...], environment: tuple[str, ...], speaks: bool
) -> None:
    assert mps3.speaks_protocol3(words, environment) is speaks


def test_the_second_grammar_reads_numbers_and_no_table() -> None:
    made = {
        "server": ("main,1000,48201,Ready,/run/nvidia-mps/main,GPU-a,GPU-b,-",),
        "client": ("3165259,main,0,default,python -c 1,2", "51087,main,0,high,python"),
    }
    (server,) = mps3.servers(lambda words: made[words[0]], multi_user=True)
    assert server == MpsServer(48201, ServerState.ACTIVE, 1000, frozenset({3165259, 51087}), True)
    for name, line in (("server", "main,1000,48201,Odd,x"), ("client", "316...,main")):
        with pytest.raises(MpsError, match="not understood"):
            mps3.servers(lambda words: {**made, name: (line,)}[words[0]], multi_user=True)  # noqa: B023


@pytest.mark.parametrize("daemon", [2], indirect=True)
def test_commands_that_the_daemon_does_not_know_are_errors(daemon: Daemon) -> None:
    with pytest.raises(MpsError, match="not found"):
        daemon.control.ask("get_client_list 1")
    with pytest.raises(MpsError, match="Invalid argument"):
        daemon.control.ask("terminate_client")


@pytest.mark.parametrize("daemon", [2], indirect=True)
def test_a_caller_that_gave_up_takes_nobody_elses_daemon_away(daemon: Daemon) -> None:
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
            caller.connect(str(daemon.control._pipes.pipe / "control"))
            caller.sendall(b"get_default_active_thread_percentage\n")
    assert daemon.control.servers() == ()


def test_a_daemon_that_is_late_counts_as_none_and_the_check_says_so(pipes: Pipes) -> None:
    late = MpsControl(pipes, ["/bin/sleep", "600"], answer_seconds=0.1)
    found = check(late, Question(serving=4711))
    assert found.refusal is MpsRefusal.UNAVAILABLE
    assert "get_server_list: no answer within 0.1 s" in found.message


def test_no_daemon_is_an_error_that_says_so(pipes: Pipes) -> None:
    program = [*PROGRAM]
    with pytest.raises(MpsError, match="Cannot find MPS control daemon"):
        MpsControl(pipes, program).servers()
    with pytest.raises(MpsError, match="no-such-program"):
        MpsControl(pipes, ["/no-such-program"]).servers()


def test_a_daemon_that_was_killed_is_not_taken_for_one_that_runs(pipes: Pipes) -> None:
    program = [*PROGRAM]
    killed = subprocess.Popen([*program, "-f", "-p", "3"], env=pipes.environment(os.environ))
    control = MpsControl(pipes, program, PATIENCE)
    try:
        assert wait_for((pipes.pipe / "control").exists, 30.0)
        assert control.protocol == 3
    finally:
        killed.kill()
        killed.wait()
    assert (pipes.pipe / "control").exists()
    assert control.protocol == 2
    with pytest.raises(MpsError, match="Cannot find MPS control daemon"):
        control.servers()
