"""One turn asked of the router as a trainer's client would ask one engine, and asked again.

The request carries an id of its own, so that a caller that lost its connection and asks again joins
the same turn: nothing is sampled twice.

    asking --200, finished--> done
    asking --429, 503, connection lost--> waiting --Retry-After--> asking   (the same id)
    asking --200, aborted--> waiting --> asking   (what is held is prompt now, under a new id)
    waiting --patience over--> ``TurnRefused``
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rose_trainer.adapters.report import finish_async, report_async
from rose_trainer.errors import TurnRefused

# What the router may get over by itself: full, waiting too long, leaving, no engine.
_AGAIN = frozenset({408, 429, 502, 503, 504})
_USUAL_SECONDS = 1.0


@dataclass
class Turn:
    """A finished turn.

    Attributes:
        spans: which version sampled which tokens, as in the router's replies.
        moves: engines the turn left.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    finish: str = ""
    cached_tokens: int = 0
    moves: int = 0

    def add(self, reply: Mapping[str, Any]) -> None:
        """Take a reply of ``/generate`` as what follows the tokens held."""
        meta, held = reply["meta_info"], len(self.tokens)
        if not held:
            self.cached_tokens = meta.get("cached_tokens", 0)
        self.tokens += reply["output_ids"]
        self.logprobs += [entry[0] for entry in meta.get("output_token_logprobs") or ()]
        self.spans += [
            {**span, "start": span["start"] + held, "end": span["end"] + held}
            for span in meta["weight_versions"]
        ]
        self.moves += len(meta["rose"]["moves"])
        self.finish = meta["finish_reason"]["type"]


class Turns:
    """Asks a router for turns; can be pickled, each process opens connections of its own.

    Args:
        url: the lease's.
        token: bearer token of its callers.
        patience_seconds: how long a turn that is refused for the moment is asked for again.
    """

    def __init__(self, url: str, token: str = "", patience_seconds: float = 1800.0) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._patience = patience_seconds
        self._http: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_http": None, "_loop": None}

    async def ask(
        self, session: str, prompt: list[int], sampling: Mapping[str, Any], group: str = ""
    ) -> Turn:
        """Run one turn to its end.

        Args:
            session: key of the trajectory.
            prompt: token ids.
            sampling: SGLang's ``sampling_params``; ``max_new_tokens`` is needed.
            group: of trajectories that answer the same prompt; empty = the router infers it.

        Raises:
            TurnRefused: the request is wrong, or patience is over.
        """
        turn, most = Turn(), int(sampling["max_new_tokens"])
        until = time.monotonic() + self._patience
        while True:
            body = {
                "input_ids": [*prompt, *turn.tokens],
                "sampling_params": {**sampling, "max_new_tokens": most - len(turn.tokens)},
                "return_logprob": True,
                "session_id": session,
                "rid": uuid.uuid4().hex,
            }
            if group:
                body["rose"] = {"group": group}
            turn.add(await self._answered(body, until))
            if turn.finish != "abort":
                return turn
            if len(turn.tokens) >= most:
                turn.finish = "length"
                return turn
            await _wait(_USUAL_SECONDS, until, f"{self._url}/generate: the turn was aborted")

    async def end(self, sessions: Sequence[str], *, withdrawn: bool = False) -> None:
        """Say that no more turns of these trajectories will come; never raises.

        Args:
            sessions: their keys.
            withdrawn: they were never meant for a step, such as those of an evaluation.
        """
        if withdrawn:
            await report_async(self._url, {}, withdrawn=sessions, token=self._token)
            return
        for session in sessions:
            await finish_async(self._url, session, self._token)

    async def close(self) -> None:
        """End this process's connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _answered(self, body: Mapping[str, Any], until: float) -> Mapping[str, Any]:
        while True:
            try:
                async with self._session().post(f"{self._url}/generate", json=body) as reply:
                    if reply.status == 200:
                        answer: dict[str, Any] = await reply.json()
                        return answer
                    why = f"{self._url}/generate: HTTP {reply.status}: {await reply.text():.500}"
                    if reply.status not in _AGAIN:
                        raise TurnRefused(why)
                    seconds = float(reply.headers.get("Retry-After") or _USUAL_SECONDS)
            except (aiohttp.ClientError, OSError) as error:
                why = f"{self._url}/generate: {type(error).__name__}: {error}"
                seconds = _USUAL_SECONDS
            await _wait(seconds, until, why)

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop or self._http.closed:
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            )
            self._loop = loop
        return self._http


async def _wait(seconds: float, until: float, why: str) -> None:
    if time.monotonic() + seconds > until:
        raise TurnRefused(why)
    await asyncio.sleep(seconds)
