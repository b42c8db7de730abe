"""What a router that was taken over holds, shown to the listeners that no GPU node has.

On the node the same is tried at all others (``test_on_the_node``). Verbs come from the table, so
one that a process serves without a rule, or that opens to routers without one, fails.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import rsa
from yarl import URL

from rose_core import rights
from rose_core.rights import CallerParty, Listener
from rose_rewards.main import running
from rose_sandbox.http import ServingTraffic, application
from rose_wire.bearer import lease_token
from tests.attack.test_on_the_node import LISTENERS
from tests.batches.helpers import fake_router
from tests.batches.test_batches import serving
from tests.faults import doors, test_listeners
from tests.sandbox.test_host import World

HERE = {Listener.REWARDS, Listener.SANDBOX, Listener.BATCHES}


def test_every_listener_of_the_table_is_tried_somewhere() -> None:
    """The API server by its own reviews; the forwarder has no port but on a trainer's loopback.

    KEDA's scaler asks nobody who he is: ``tests/rewards/test_keda`` has what it says.
    """
    fleet = set(test_listeners.LISTENERS.values())
    tried = (
        set(LISTENERS.values()) | HERE | fleet | {Listener.API, Listener.FORWARD, Listener.SCALER}
    )
    assert tried == set(Listener)


@pytest.fixture
def held() -> dict[str, str]:
    """Words like those that a router holds, and where they are believed."""
    claims = {"sub": "system:serviceaccount:rose-routers:rose-router", "aud": ["rose-router/a/b"]}
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return {
        "nothing": "",
        "proof of its pod": jwt.encode(claims, key, "RS256", headers={"kid": "k"}),
        "token of its lease": lease_token("word", "research/grpo"),
        "token of its slot": secrets.token_urlsafe(32),
        "token of its ingest": secrets.token_hex(16),
    }


async def rewards(folder: Path) -> AsyncIterator[int]:
    listed, tokens = folder / "functions.yaml", folder / "tokens"
    listed.write_text(json.dumps({"exact": {"rule": "exact"}}))
    tokens.write_text("research word\n")
    async with running(listed, token_file=tokens) as (_, port):
        yield port


async def sandboxes(folder: Path) -> AsyncIterator[int]:
    runner = web.AppRunner(application(World(folder).host, ServingTraffic(), lambda: "word"))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def batches(folder: Path) -> AsyncIterator[int]:
    async with fake_router() as router, serving(folder, router, token="word") as caller:
        port = URL(caller().url).port
        assert port is not None
        yield port


SERVED = {
    Listener.REWARDS: rewards,
    Listener.SANDBOX: sandboxes,
    Listener.BATCHES: batches,
}


@pytest.mark.parametrize("listener", sorted(HERE))
async def test_it_opens_there_what_everybody_may(
    listener: Listener, held: dict[str, str], tmp_path: Path
) -> None:
    """The batches of its own lease it reaches by a token of theirs, which opens no others."""
    verbs = rights.verbs(listener)
    async for port in SERVED[listener](tmp_path):
        for what, word in held.items():
            found = await doors.knock(port, word, verbs)
            assert found.answered == verbs, what
            assert found.let_in == rights.allowed(listener, CallerParty.ANYBODY), what
        own = await doors.knock(port, "word", verbs)
        assert own.let_in > rights.allowed(listener, CallerParty.ANYBODY), (
            "its own token opens more"
        )
