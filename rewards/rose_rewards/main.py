"""``rose rewards``: the process behind the one URL of reward functions.

    rose rewards --functions functions.yaml --address 127.0.0.1:8100

With ``--workers 0`` pods verify, which dial it (``rose reward-worker``). KEDA hears at
``--scaler-address`` how many are wished for.

``POST /v1/rewards`` waits for the result and answers 200 with it, whatever it is. 400 says that the
request is wrong, 429 that the queue is full.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from rose_core.unreadable import UNREADABLE
from rose_rewards import functions, keda, metrics
from rose_rewards.errors import BadReward, Busy, RewardsError
from rose_rewards.functions import SHARED
from rose_rewards.gateway import REMEMBERED, Gateway, Reward
from rose_rewards.homes import homes
from rose_rewards.journal import ResultJournal
from rose_rewards.links import LinkedWorkers
from rose_rewards.pool import WorkerPool, users
from rose_wire import flags, observability
from rose_wire.daemon import listen, stop_signal
from rose_wire.flags import VerbParser

LOG = logging.getLogger(__name__)
_RETRY_AFTER = {"Retry-After": "1"}
_WORK = "--work-token-file"
# An answer of some hundred thousand tokens as text.
_BODY_BYTES = 4 << 20
# Above those of people and packages on common images, below those that Kubernetes gives to pods.
_FIRST_USER = 61_000


def teams_of(path: Path | None, flag: str = "--token-file") -> dict[str, str]:
    """Tokens and their teams, a line ``TEAM TOKEN`` each; nothing without a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no pair, or two teams have one token.
    """
    if path is None:
        return {}
    pairs = [line.split() for line in path.read_text().splitlines() if line.strip()]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        message = f"{flag} {path}: expected a line TEAM TOKEN for each team"
        raise ValueError(message)
    found: dict[str, str] = {}
    for team, token in pairs:
        if found.setdefault(token, team) != team:
            message = (
                f"{flag} {path}: {found[token]} and {team} have the same token, and would be "
                "one team; give each its own"
            )
            raise ValueError(message)
    return found


def caller_of(request: web.Request, teams: Mapping[str, str]) -> str | None:
    """The caller's team; None when the token is nobody's, and empty where there are no teams."""
    if not teams:
        return ""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    shown = given.strip().encode(errors="replace") if scheme.lower() == "bearer" else b""
    found = [team for token, team in teams.items() if hmac.compare_digest(shown, token.encode())]
    return found[0] if found else None


def application(
    gateway: Gateway,
    teams: Mapping[str, str],
    target: float,
    workers: LinkedWorkers | None = None,
    work_teams: Mapping[str, str] | None = None,
) -> web.Application:
    """The routes over one gateway.

    Args:
        gateway: computes.
        teams: by token; empty lets everybody in as no team.
        target: seconds in which what waits should be computed.
        workers: takes pods' workers; None = the gateway has workers of its own.
        work_teams: by token, whose functions a pod's worker serves, ``SHARED`` for those of
            nobody; empty lets everybody serve those.
    """

    async def score(request: web.Request) -> web.Response:
        team = caller_of(request, teams)
        if team is None:
            return _error(401, "send Authorization: Bearer TOKEN of your team (--token-file)")
        try:
            reward = msgspec.json.decode(await request.read(), type=Reward)
            result = await gateway.score(reward, team)
        except (*UNREADABLE, BadReward) as error:
            return _error(400, str(error))
        except Busy as error:
            return _error(429, str(error), _RETRY_AFTER)
        return web.Response(body=msgspec.json.encode(result), content_type="application/json")

    async def queue(request: web.Request) -> web.Response:
        team = caller_of(request, teams)
        if team is None:
            return _error(401, "send Authorization: Bearer TOKEN of your team (--token-file)")
        whose = team or None  # where there are teams, none hears of what another's rewards take
        figures = {
            "queue": gateway.queued(whose),
            "p50_seconds": gateway.p50(whose),
            "wish": gateway.wish(target, whose),
        }
        return web.json_response(figures)

    app = web.Application(client_max_size=_BODY_BYTES)
    app.add_routes([*observability.pages(metrics.REGISTRY)])
    app.add_routes([web.post("/v1/rewards", score), web.get("/v1/queue", queue)])
    app.add_routes([web.get("/v1/work", _work(workers, work_teams or {}))])
    return app


def _work(
    workers: LinkedWorkers | None, teams: Mapping[str, str]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The route that pods' workers dial."""

    async def work(request: web.Request) -> web.StreamResponse:
        if workers is None:
            return _error(401, "this gateway has workers of its own (--workers 0 takes others)")
        team = caller_of(request, teams)
        if team is None:
            return _error(401, f"send Authorization: Bearer TOKEN of your team ({_WORK})")
        return await workers.serve(request, "" if team == SHARED else team)

    return work


def _error(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response({"message": text}, status=status, headers=headers)


@contextlib.asynccontextmanager
async def running(
    path: Path,
    *,
    address: str = "127.0.0.1:0",
    workers: int = 1,
    queue_limit: int = 4096,
    token_file: Path | None = None,
    first_user: int = _FIRST_USER,
    target: float = 1.0,
    patience: float = 0.0,
    cold_start: float = 1.5,
    folder: Path | None = None,
    work_token_file: Path | None = None,
    scaler_address: str | None = None,
) -> AsyncIterator[tuple[Gateway, int]]:
    """Serve until the block ends; gives the gateway and its port.

    With ``workers`` 0 pods verify that dial it (``rose_rewards.remote``).

    Raises:
        BadFunctions: the list is wrong, or teams cannot be kept apart here.
        TornJournal: the results in ``folder`` cannot be used.
        OSError, ValueError: the address is taken, or the token file is wrong.
    """
    listed, teams = functions.read(path), teams_of(token_file)
    for name in listed:
        metrics.expect(name)
    # Judges are asked at once and for as long as the list says: neither bound is aiohttp's to set.
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        )
        journal = None
        if folder is not None:
            journal = await asyncio.to_thread(ResultJournal, folder, REMEMBERED)
            stack.callback(journal.close)
        pool: WorkerPool | LinkedWorkers
        linked = None
        if workers:
            whose = users(listed, first_user)
            pool = WorkerPool(listed, whose, workers, stack.enter_context(homes()))
        else:
            pool = linked = LinkedWorkers(listed)
        gateway = Gateway(
            listed,
            pool,
            session,
            queue_limit,
            journal=journal,
            patience=patience,
            cold_start=cold_start,
        )
        gateway.remember()
        if linked is not None:
            linked.on_room = gateway.fill
        app = application(gateway, teams, target, linked, teams_of(work_token_file, _WORK))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            wishes = {one.team: partial(gateway.wish, target, one.team) for one in listed.values()}
            if linked is not None:
                stack.enter_context(metrics.shown(wishes))
            if scaler_address:

                def wished(name: str) -> int:
                    return wishes["" if name == SHARED else name]()

                named = {team or SHARED for team in wishes}
                scaler = keda.serving(keda.ExternalScaler(wished, named), scaler_address)
                LOG.info("KEDA dials port %d", await stack.enter_async_context(scaler))
            yield gateway, await listen(runner, address)
        finally:
            await gateway.close()
            await runner.cleanup()


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = VerbParser(prog="rose rewards", description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--functions", type=Path, required=True, help="the platform's list, YAML")
    add("--address", type=flags.listener, default="127.0.0.1:8100", help="HOST:PORT")
    add(
        "--workers",
        type=flags.count,
        default=os.cpu_count() or 1,
        help="verifications at a time; 0: none here, rose reward-worker dials and does them",
    )
    add(
        "--folder",
        type=Path,
        help="results are kept there, and are the same after a restart; on a durable disk",
    )
    add("--queue-limit", type=flags.one_or_more, default=4096, help="rewards that may wait")
    add("--token-file", type=Path, help="a line TEAM TOKEN for each team")
    add(
        "--first-user",
        type=flags.one_or_more,
        default=_FIRST_USER,
        help="user id of the first team",
    )
    add(
        "--target-seconds",
        type=flags.above_zero,
        default=1.0,
        help="after a reward was taken, in which the workers that are wished for would have it",
    )
    add(
        "--patience-seconds",
        type=flags.amount,
        default=0.0,
        help="more for one whose group lacks others that are still rolled out, as nobody waits for "
        "it yet",
    )
    add(
        "--cold-start-seconds",
        type=flags.amount,
        default=1.5,
        help="until a worker that is wished for is ready: some stay for rewards that come sooner",
    )
    add(
        _WORK,
        type=Path,
        help=f"with --workers 0: a line TEAM TOKEN for each team's workers, {SHARED} for functions "
        "of nobody",
    )
    add(
        "--scaler-address",
        type=flags.listener,
        help="HOST:PORT of KEDA's external scaler, which hears how many workers are wished for",
    )
    flags.add_log_level(made)
    return made


async def _serve(given: argparse.Namespace) -> None:
    stop = stop_signal()
    async with running(
        given.functions,
        address=given.address,
        workers=given.workers,
        queue_limit=given.queue_limit,
        token_file=given.token_file,
        first_user=given.first_user,
        target=given.target_seconds,
        patience=given.patience_seconds,
        cold_start=given.cold_start_seconds,
        folder=given.folder,
        work_token_file=given.work_token_file,
        scaler_address=given.scaler_address,
    ) as (_, port):
        LOG.info("ready: port %d", port)
        await stop.wait()


def main(argv: list[str]) -> int:
    """``rose rewards``: 0 stopped, 1 could not start."""
    given = parser().parse_args(argv)
    logging.basicConfig(level=given.log_level, format="%(asctime)s %(levelname)s %(message)s")
    try:
        flags.refuse_open(given.address, given.token_file, "everybody could call")
        if not given.workers:
            flags.refuse_open(
                given.address, given.work_token_file, "everybody could compute rewards", give=_WORK
            )
        asyncio.run(_serve(given))
    except (OSError, ValueError, RewardsError) as error:
        sys.stderr.write(f"rose rewards: {flags.complaint(error, argv)}\n")
        return 1
    return 0
