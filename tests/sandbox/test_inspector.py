"""What the inspector says about turns on real sandboxes."""

from __future__ import annotations

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
    ("sleep 1000 &", PROCESSES),
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
    ("(while :; do date > /home/now; sleep 0.02; done) & sleep 0.3", FULL),
    ("sleep 0.5", FULL),
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
        said = await inspector.effects("box", await runc.facts(box))
        await inspector.saved("box")
        assert said.calls
        if expected is not None and said.kind is not expected:
            wrong.append((command, expected.value, said))
    assert not wrong, "\n".join(map(str, wrong))


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

    for kind, listen in (("tcp", "TCP-LISTEN:9000"), ("udp6", "UDP6-RECV:9001")):
        await runc.exec(box, f"socat {listen} EXEC:cat & sleep 0.5", 20)
        assert (await inspector.effects("box", await runc.facts(box))).kind is PROCESSES
        await inspector.saved("box")
        assert kind in read
