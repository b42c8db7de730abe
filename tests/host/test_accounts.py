"""Every engine under a user of its own: what it may reach of the node, and what it may not."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rose_agent.errors import BadEngine
from rose_agent.host.processes import process
from rose_agent.host.processes.launchers import EngineProgram
from rose_agent.host.users.accounts import COUNT, Account, Accounts
from rose_agent.os.freezers import detect
from rose_engines.node.permit import Permit
from rose_engines.node.rundir import RunDir, SlotDir, write_json

FIRST = 42_000
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="changing users needs root")


@pytest.fixture
def node(rundir: Path) -> RunDir:
    made = RunDir(rundir).create()
    Accounts(FIRST).open(made)
    return made


def slot_of(node: RunDir, uid: str) -> SlotDir:
    slot = node.slot(uid).create()
    Permit.create(slot.permit).detach()
    write_json(slot.slot, {"token": "secret"})
    (slot.bundles / "block").write_text("weights")
    return slot


async def tries(tmp_path: Path, account: Account, commands: list[str]) -> list[bool]:
    """Run commands as the account; which of them succeeded."""
    script = "; ".join(
        f"if {command} 2>/dev/null; then echo +; else echo -; fi" for command in commands
    )
    log = tmp_path / f"log-{account.uid}"
    program = EngineProgram(("/bin/sh", "-c", script))
    inside = process.Containment("x", detect("signals"), log, account)
    spawned = await process.spawn(program, inside)
    assert await spawned.root.wait() == 0
    return [line == "+" for line in log.read_text().split()]


@root_only
async def test_an_engine_reaches_what_it_needs_and_nothing_of_others(
    node: RunDir, tmp_path: Path
) -> None:
    accounts = Accounts(FIRST)
    mine, other = slot_of(node, "mine"), slot_of(node, "other")
    account, foreign = accounts.take(mine), accounts.take(other)
    assert (account.uid, foreign.uid) == (FIRST, FIRST + 1)
    node.host_socket.touch(mode=0o600)
    outcomes = {
        f"test $(id -u) = {FIRST}": True,
        f"test $(id -G) = {FIRST}": True,
        "grep -q 'NoNewPrivs:.1' /proc/self/status": True,
        "grep -q 'CapEff:.0000000000000000' /proc/self/status": True,
        "test $(cat /proc/self/oom_score_adj) = 1000": True,
        f"cat {mine.permit}": True,
        f"cat {mine.bundles}/block": True,
        f"touch {mine.own}/plugin.sock": True,
        "touch $HOME/cache $TMPDIR/scratch": True,
        f"touch {mine.permit}": False,
        f"mv {mine.permit} {mine.own}/": False,
        f"touch {mine.folder}/engine.json": False,
        f"cat {mine.slot}": False,
        f"ls {mine.bundles}/..": False,
        f"cat {other.permit}": False,
        f"cat {other.bundles}/block": False,
        f"ls {node.slots}": False,
        f"ls {node.root}": False,
        f"cat {node.host_socket}": False,
        f"touch {node.root}/stop": False,
    }
    done = await tries(tmp_path, account, [f"{one} >/dev/null" for one in outcomes])
    assert dict(zip(outcomes, done, strict=True)) == outcomes
    for slot in (mine, other):
        accounts.release(slot)


@root_only
def test_a_user_is_given_again_once_its_engine_has_ended(node: RunDir) -> None:
    accounts = Accounts(FIRST)
    first = accounts.take(slot_of(node, "a"))
    assert accounts.take(node.slot("a")) == first, "a restarted engine keeps its user"
    assert first.home is not None
    assert stat.S_IMODE(first.home.stat().st_mode) == 0o700
    accounts.release(node.slot("a"))
    assert not first.home.exists()
    second = accounts.take(slot_of(node, "b"))
    assert second.uid == FIRST
    accounts.release(node.slot("b"))


def test_without_a_first_user_engines_run_as_the_host(node: RunDir) -> None:
    account = Accounts().take(slot_of(node, "a"))
    assert (account, account.environment) == (Account(), {})


@root_only
def test_users_run_out_by_name(node: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = Accounts(FIRST)
    accounts._taken = {str(n): Account(FIRST + n) for n in range(COUNT)}
    with pytest.raises(BadEngine, match="all 1000 users from 42000"):
        accounts.take(slot_of(node, "one-more"))
