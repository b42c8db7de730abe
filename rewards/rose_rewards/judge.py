"""Asks a lease's model for a verdict. Its engine batches the judges that are asked at once.

| the router or its engine | is asked again |
|---|---|
| is away: no connection, one that broke, or a status that says so | until the time is over |
| fails, or answers with what is no chat completion | until ``tries`` are used up |
| refuses | never |

To be away is no try: a router that restarts has its engines back after some seconds, and asking a
model twice does no harm.
"""

from __future__ import annotations

import asyncio
import re

import aiohttp

from rose_rewards.asking import AWAY, pause_seconds
from rose_rewards.errors import WorkerEnded
from rose_rewards.functions import RewardFunction
from rose_wire import flags

_FAILED = 500
_PAUSE_SECONDS = 0.5  # after the first time; a router that restarts takes some seconds
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


async def verdict(
    function: RewardFunction, session: aiohttp.ClientSession, fields: dict[str, str]
) -> float | None:
    """The last number that the judge says; None when it says none.

    Raises:
        WorkerEnded: the judge refused, failed at every try, or gave nothing within the function's
            ``seconds``; says what it said last.
    """
    body = {
        "model": function.model,
        "messages": [{"role": "user", "content": function.prompt.format_map(fields)}],
        "temperature": 0,
    }
    url = f"{str(function.judge).rstrip('/')}/v1/chat/completions"
    problem, asked, failed = "it had not answered yet", 0, 0
    try:
        async with asyncio.timeout(function.seconds):
            while failed < function.tries:
                if asked:
                    await asyncio.sleep(pause_seconds(asked, _PAUSE_SECONDS))
                asked += 1
                try:
                    token = flags.token(function.token_file)
                    shown = {"Authorization": f"Bearer {token}"} if token else {}
                    async with session.post(url, json=body, headers=shown) as reply:
                        if reply.status == 200:
                            answer = await reply.json()
                            found = _NUMBER.findall(str(answer["choices"][0]["message"]["content"]))
                            return float(found[-1]) if found else None
                        problem = f"{reply.status}: {(await reply.text())[:200]}"
                        if reply.status not in AWAY | {_FAILED}:
                            break
                        failed += reply.status == _FAILED
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                    problem = f"{type(error).__name__}: {error}"
                except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
                    problem = f"{type(error).__name__}: {error}"
                    failed += 1
    except TimeoutError as error:
        message = f"judge {function.judge}: no verdict within {function.seconds:g} s; {problem}"
        raise WorkerEnded(message) from error
    message = f"judge {function.judge}, asked {asked} times: {problem}"
    raise WorkerEnded(message)
