"""Random turns on a real sandbox: what a full diff of files and memory finds, the inspector says.

The diff knows nothing of the inspector's ways: it reads every byte of the changed files, and what
every process has in memory. It may find less than the inspector, never more.
"""

from __future__ import annotations

import os
import random

import pytest

from bench.sandboxes.full_diff import full_state, surely_changed
from rose_sandbox.errors import Unavailable
from rose_sandbox.inspector.bpf import BpfInspector
from rose_sandbox.inspector.inspector import Class
from rose_sandbox.runtimes.parts import Parts
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runtime import SandboxSpec

pytestmark = pytest.mark.sandbox

# The seed of the lane; ROSE_SANDBOX_TURNS plays more.
SEED, TURNS = 20260, int(os.environ.get("ROSE_SANDBOX_TURNS", "60"))
MEMORY_OF = "python3 -u /home/keeper.py"
KEEPER = b"""
import os
os.path.exists('/home/in') or os.mkfifo('/home/in')
kept = {}
while True:
    with open('/home/in') as lines:
        for line in lines:
            name, _, value = line.strip().partition('=')
            kept[name] = value
"""


def command(dice: random.Random) -> str:
    """One step of a turn."""
    name = f"/home/f{dice.randrange(4)}"
    other = f"/home/f{dice.randrange(4)}"
    return dice.choice(
        [
            "ls -la /home",
            "cat /etc/passwd | wc",
            "ps aux",
            "git --version",
            f"cat {name}",
            f"cat {name} 2>/dev/null | sort | uniq -c",
            "python3 -c 'import json; print(json.dumps([1]))'",
            f"echo {dice.random()} > /home/t && rm /home/t",
            "(sleep 0.02 &) ; sleep 0.05",
            f"echo {dice.random()} >> {name}",
            f"printf x | dd of={name} conv=notrunc 2>/dev/null",
            f"cp -p {name} {other} 2>/dev/null",
            f"mv {name} {other} 2>/dev/null",
            f"rm -f {name}",
            f"ln -sf {name} /home/link",
            f"chmod {dice.choice(['600', '644'])} {name} 2>/dev/null",
            f"touch -d 2020-01-0{dice.randrange(1, 9)} /home/f*",
            f"python3 -c \"import mmap; f=open('/home/m','a+b'); f.truncate(4096); "
            f'm=mmap.mmap(f.fileno(),4096); m[0]={dice.randrange(256)}; m.close()"',
            f"truncate -s {dice.randrange(9999)} {name}",
            f"mkdir -p /home/d{dice.randrange(3)}",
            f"rmdir /home/d{dice.randrange(3)} 2>/dev/null",
            "sed -i s/0/1/ /etc/services",
            f"sleep {dice.randrange(1000, 2000)} &",
            "pkill -o -x sleep",
            f"echo {dice.random()} > /dev/shm/x",
            "rm -f /dev/shm/x",
            f"echo {dice.random()} > /dev/x",
            f"echo v{dice.randrange(9)}={dice.randrange(9)} > /home/in",
            f"sqlite3 /home/db 'create table if not exists t(a); insert into t values "  # noqa: S608
            f"({dice.randrange(9)})'",
            f"exec 5>>{name}; echo {dice.random()} >&5; exec 5>&-",
            f"cd /home/d{dice.randrange(3)} 2>/dev/null",
            f"V={dice.randrange(5)}",
            "tar -C /home -cf - . | tar -tf - > /dev/null",
        ]
    )


async def test_no_effect_is_missed(runc: RuncRuntime, parts: Parts) -> None:
    try:
        inspector = BpfInspector(parts.folder / "bpf")
    except Unavailable as error:
        pytest.skip(str(error))
    dice = random.Random(SEED)
    box = await runc.create(SandboxSpec("box"))
    await runc.write_file(box, "/home/keeper.py", KEEPER)
    await runc.exec(box, f"{MEMORY_OF} & until [ -p /home/in ]; do sleep 0.05; done", 20)
    first = full_state(await runc.facts(box))
    await inspector.watch("box", await runc.facts(box))
    before = first, full_state(await runc.facts(box))
    missed, none = [], 0
    for _ in range(TURNS):
        turn = "; ".join(command(dice) for _ in range(dice.randrange(1, 4)))
        turn = f"timeout 2 bash -c {_quoted(turn)}" if "/home/in" in turn else turn
        session = dice.choice([None, "main"])
        await runc.exec(box, turn, 20, session=session)
        facts = await runc.facts(box)
        first = full_state(facts)
        result = await inspector.effects("box", facts)
        await inspector.saved("box")
        now = first, full_state(await runc.facts(box))
        files, processes = surely_changed(before, now)
        if result.kind is not Class.UNKNOWN and (
            (files and not result.files) or (processes and not result.processes)
        ):
            missed.append((turn, session, result))
        none += result.kind is Class.NONE
        before = now
    await inspector.close()
    assert missed == []
    # Those of the steps that leave nothing are about a third.
    assert none > TURNS // 20


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
