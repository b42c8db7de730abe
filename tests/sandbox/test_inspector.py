"""What the inspector says about turns on real sandboxes."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator

import pytest

from rose_sandbox.errors import Unavailable
from rose_sandbox.inspector import witness
from rose_sandbox.inspector.bpf import BpfInspector
from rose_sandbox.inspector.inspector import Class
from rose_sandbox.runtimes.parts import Parts
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runtime import SandboxSpec

pytestmark = pytest.mark.sandbox


@pytest.fixture
async def inspector(parts: Parts) -> AsyncIterator[BpfInspector]:
    try:
        inspector = BpfInspector(parts.folder / "bpf")
    except Unavailable as error:
        pytest.skip(str(error))
    yield inspector
    await inspector.close()


NONE, FILES, PROCESSES, FULL, UNKNOWN = Class
MAP = (
    'import mmap; f = open("/dev/shm/a", "r+b"); m = mmap.mmap(f.fileno(), 2); m[0] = 7; m.close()'
)
RESTS = "until grep -q '(sleep) S' /proc/$!/stat; do sleep 0.01; done"
TICKS = "until test -s /home/now; do sleep 0.05; done"
# A turn's command -> its class; each begins where the one before ended.
TURNS = [
    ("ls -la /", NONE),
    ("cat /etc/passwd | grep root", NONE),
    ("python3 -c 'print(sum(range(1000)))'", NONE),
    ("echo x > /home/a && rm /home/a", NONE),
    ("sleep 0.05 & wait", NONE),
    ("mkdir -p /home/w/x && rmdir /home/w/x && rmdir /home/w", NONE),
    ("echo x > /home/a", FILES),
    ("ls /home; wc /home/a", NONE),
    ("chmod 600 /home/a", FILES),
    ("rm /home/a", FILES),
    ("ln -s /etc /home/l; mkfifo /home/p", FILES),
    ("touch -d 2020-01-01 /home", FILES),
    ("rm /etc/hostname; mv /usr/share/doc /usr/share/docs", FILES),
    # What has begun only when the next turn does would be that turn's.
    (f"sleep 1000 & {RESTS}", PROCESSES),
    ("ps aux", NONE),
    ("pkill -x sleep", PROCESSES),
    ("echo x > /dev/shm/a", PROCESSES),
    (f"python3 -c '{MAP}'", PROCESSES),
    ("truncate -s 900G /dev/shm/a", PROCESSES),
    ("cat /dev/shm/a | head -c 10", NONE),
    ("rm /dev/shm/a", PROCESSES),
    ("echo x > /dev/kept", PROCESSES),
    ("cat /dev/kept > /dev/null; echo > /dev/null", NONE),
    ("rm /dev/kept", PROCESSES),
    (f"(while :; do date > /home/now; sleep 0.02; done) & {TICKS}", FULL),
    (f"rm /home/now; {TICKS}", FULL),
    ("pkill -f date; pkill bash; sleep 0.1; true", None),
]
SESSION = [
    ("true", PROCESSES),  # the shell begins
    ("ls -la /", NONE),
    ("cat /etc/passwd | grep root | wc", NONE),
    ("cd /home", PROCESSES),
    ("pwd; python3 -c 'print(1)'", NONE),
    ("X=1", PROCESSES),
    ("X=1; echo $X", NONE),
    ("X=2", PROCESSES),
    ("f() { echo 1; }", PROCESSES),
    ("f", NONE),
    ("set -- a b", PROCESSES),
    ("umask 077", PROCESSES),
    ("exec 5>/home/five", FULL),
    ("false; ls", NONE),
    ("echo y >&5", FULL),
    ("exec 5>&-", PROCESSES),
    ("trap 'echo bye' TERM", PROCESSES),
    ("ulimit -n 100", PROCESSES),
    ("renice -n $(($(nice) + 2)) -p $$ > /dev/null", PROCESSES),
    ("echo 500 > /proc/$$/oom_score_adj", UNKNOWN),
    ("shopt -s nullglob", PROCESSES),
    ("echo 1 > /home/f", FILES),
]


@pytest.mark.parametrize(("turns", "session"), [(TURNS, None), (SESSION, "main")])
async def test_turns_are_classed_by_their_net_effect(
    runc: RuncRuntime,
    inspector: BpfInspector,
    turns: list[tuple[str, Class | None]],
    session: str | None,
) -> None:
    box = await runc.create(SandboxSpec("box"))
    await inspector.watch("box", await runc.facts(box))
    wrong = []
    for command, expected in turns:
        await runc.exec(box, command, 20, session=session)
        result = await inspector.effects("box", await runc.facts(box))
        await inspector.saved("box")
        assert result.calls
        if expected is not None and result.kind is not expected:
            wrong.append((command, expected.value, result))
    assert not wrong, "\n".join(map(str, wrong))


# Waits in a read with a text in its memory, and says where that lies.
TARGET = b"""
import ctypes, sys
text = ctypes.create_string_buffer(b"A" * 64)
open("/home/at", "w").write(str(ctypes.addressof(text)))
sys.stdin.readline()
"""
# Writes into the memory of another process, which does not run meanwhile.
POKE = b"""
import os, sys
process, way = sys.argv[1:]
path = f"/proc/{process}/mem"
if way == "relative":
    os.chdir(f"/proc/{process}")
    path = "mem"
if way == "dots":
    path = f"/home/../proc/{process}/mem"
if way == "link":
    os.symlink(path, "/tmp/link")
    path = "/tmp/link"
memory = os.open(path, os.O_RDWR)
if way == "later":
    os.set_inheritable(memory, True)
    os.execvp("sh", ["sh", "-c", "read x < /home/go; exec python3 /home/late.py " + str(memory)])
os.pwrite(memory, b"B", int(open("/home/at").read()))
"""
LATE = b"""
import os, sys
os.pwrite(int(sys.argv[1]), b"B", int(open("/home/at").read()))
"""


@pytest.mark.parametrize("way", ["plain", "relative", "dots", "link", "later"])
async def test_a_write_into_the_memory_of_another_process_is_unknown_by_whatever_name(
    runc: RuncRuntime, inspector: BpfInspector, way: str
) -> None:
    """Its name told, so that who went to the folder first was said to have changed nothing."""
    box = await runc.create(SandboxSpec("box"))
    for name, program in (("target", TARGET), ("poke", POKE), ("late", LATE)):
        await runc.write_file(box, f"/home/{name}.py", program)
    begin = "mkfifo /home/in /home/go; (exec 9<>/home/in; python3 /home/target.py <&9) & "
    begin += "until [ -s /home/at ]; do sleep 0.1; done"
    assert (await runc.exec(box, begin, 60)).exit_code == 0
    poke = f"python3 /home/poke.py $(pgrep -fx 'python3 /home/target.py') {way}"
    if way == "later":  # it has it open before the turn begins
        waits = "until pgrep -f 'exec python3 /home/late[.]py'; do sleep 0.1; done"
        await runc.exec(box, f"({poke}; touch /tmp/done) & {waits}", 60)
        poke = "echo > /home/go; until [ -e /tmp/done ]; do sleep 0.1; done"
    await inspector.watch("box", await runc.facts(box))
    made = await runc.exec(box, poke, 60)
    assert made.exit_code == 0, made
    result = await inspector.effects("box", await runc.facts(box))
    assert result.unknown == ("memory of another process",)


IN_C = "python3 -c 'import ctypes; c = ctypes.CDLL(None); {}'"
MAPPED = (
    "import mmap, time; f = open('/home/m', 'wb+'); f.truncate(9); m = mmap.mmap(f.fileno(), 9)"
)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (IN_C.format("c.process_vm_writev(1, None, 0, None, 0, 0)"), "memory of another process"),
        (IN_C.format("c.msgget(7, 0o1600)"), "System V or POSIX queues"),
        (f'python3 -c "{MAPPED}; time.sleep(1000)" & sleep 1', "shared writable map"),
    ],
)
async def test_what_leaves_no_trace_is_unknown(
    runc: RuncRuntime, inspector: BpfInspector, command: str, reason: str
) -> None:
    box = await runc.create(SandboxSpec("box"))
    await inspector.watch("box", await runc.facts(box))
    await runc.exec(box, command, 60)
    result = await inspector.effects("box", await runc.facts(box))
    assert (result.kind, result.unknown) == (UNKNOWN, (reason,))
    await runc.end(box)


async def test_an_inspector_that_is_dead_lost_events_or_did_not_watch_vouches_for_nothing(
    runc: RuncRuntime, inspector: BpfInspector
) -> None:
    box = await runc.create(SandboxSpec("box"))
    facts = await runc.facts(box)
    assert (await inspector.effects("box", facts)).unknown == ("it was not watched",)
    await inspector.watch("box", facts)
    assert (await inspector.effects("box", facts)).kind is NONE

    await runc.exec(box, "ls", 20)
    await inspector.effects("box", facts)
    await inspector.saved("box")
    assert facts.cgroup is not None
    inspector._program.watch(facts.cgroup.stat().st_ino)  # somebody counts from zero
    assert "lost events" in (await inspector.effects("box", facts)).unknown

    for link in inspector._program._links:  # the kernel has let go of it
        inspector._program._lib.bpf_link__destroy(ctypes.c_void_p(link))
    inspector._program._links = []
    dead = await inspector.effects("box", facts)
    assert (dead.kind, dead.unknown) == (UNKNOWN, ("the inspector does not answer",))


async def test_tables_of_sockets_are_read_where_there_are_sockets(
    runc: RuncRuntime, inspector: BpfInspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel walks through all of its own for each, which was most of what a look cost."""
    read: list[str] = []
    text = witness._text

    def noted(path: str) -> str:
        read.append(path.rpartition("/")[2])
        return text(path)

    monkeypatch.setattr(witness, "_text", noted)
    box = await runc.create(SandboxSpec("box"))
    await inspector.watch("box", await runc.facts(box))
    assert not {"tcp", "tcp6", "udp", "udp6"} & set(read)

    for kind, listen in (("tcp", "TCP4-LISTEN:9000"), ("udp6", "UDP6-RECV:9001")):
        # Until it listens: half a second is not always enough for a program to start.
        until = f"until grep -q ':232[89] ' /proc/net/{kind}; do sleep 0.05; done"
        listening = await runc.exec(box, f"socat {listen} EXEC:cat & {until}", 60)
        assert listening.exit_code == 0, listening
        assert (await inspector.effects("box", await runc.facts(box))).kind is PROCESSES
        await inspector.saved("box")
        assert kind in read
