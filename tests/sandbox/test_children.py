"""Children of a fork: whose names they have, and that a fork with a name is made once."""

from pathlib import Path

import pytest

from rose_sandbox import children
from rose_sandbox.errors import AlreadyThere
from tests.sandbox.test_host import World


async def test_children_of_forks_have_names_that_nobody_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child by the name of another would have fenced and replaced it."""
    world = World(tmp_path)
    drawn = iter(["a", "a", "b", "a", "b", "c"])
    monkeypatch.setattr(children, "draw", lambda: next(drawn))
    await world.host.create("s")
    await world.host.checkpoint("s", [1])
    first = await world.host.fork("s", 2)
    assert first.sessions == ("s.1-a", "s.1-b")
    await world.host.end("s.1-a")  # away, and its records are there
    assert (await world.host.fork("s", 1)).sessions == ("s.1-c",)


async def test_a_fork_with_a_name_is_made_once_at_whichever_host_it_is_asked_again(
    tmp_path: Path,
) -> None:
    """Its first answer may have been lost with the router that had asked for it."""
    world = World(tmp_path)
    host, other = world.host, World(tmp_path, "two")
    await host.create("s")
    await world.said("s", "echo 1 > /home/a")
    await host.checkpoint("s", [1])
    made = await host.fork("s", 2, name="group")
    await world.said("s", "echo 2 > /home/a")
    await host.checkpoint("s", [1, 2])
    for again in (host, other.host):
        assert await again.fork("s", 2, name="group") == made
        assert await again.fork("s", 2, 1, name="group") == made
    assert set(host.sessions()) == {"s", *made.sessions}
    assert other.host.sessions() == ()
    with pytest.raises(AlreadyThere, match="was of turn 1"):
        await host.fork("s", 2, 2, name="group")
    another = await host.fork("s", 2, name="another")
    assert not set(another.sessions) & set(made.sessions)
    assert another.turn == 2
    await host.end(made.sessions[1], forget=True)  # as one that a host died before it had made
    three = (await host.fork("s", 3, name="group")).sessions
    assert three[:2] == made.sessions
    for child in three:
        assert await world.said(child, "cat /home/a") == "1"
    await other.host.close()
