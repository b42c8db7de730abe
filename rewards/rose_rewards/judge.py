"""Asks a lease's model for a verdict. Its engine batches the judges that are asked at once."""

from __future__ import annotations

import asyncio
import re

import aiohttp

from rose_rewards.errors import WorkerEnded
from rose_rewards.functions import RewardFunction
from rose_wire import flags

# Away for now, not wrong: a router without engines, a full queue, a restart.
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
_PAUSE_SECONDS = 0.5
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


async def verdict(
    function: RewardFunction, session: aiohttp.ClientSession, fields: dict[str, str]
) -> float | None:
    """The last number that the judge says; None when it says none.

    Raises:
        WorkerEnded: the judge refused, or was away at every try; says which.
    """
    body = {
        "model": function.model,
        "messages": [{"role": "user", "content": function.prompt.format_map(fields)}],
        "temperature": 0,
    }
    said = "it was not asked"
    for attempt in range(function.tries):
        if attempt:
            await asyncio.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            token = flags.token(function.token_file)
            shown = {"Authorization": f"Bearer {token}"} if token else {}
            url = f"{str(function.judge).rstrip('/')}/v1/chat/completions"
            async with session.post(url, json=body, headers=shown) as reply:
                if reply.status == 200:
                    answer = await reply.json()
                    found = _NUMBER.findall(str(answer["choices"][0]["message"]["content"]))
                    return float(found[-1]) if found else None
                said = f"{reply.status}: {(await reply.text())[:200]}"
                if reply.status not in _AGAIN:
                    break
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            said = f"{type(error).__name__}: {error}"
    message = f"judge {function.judge}, {attempt + 1} tries: {said}"
    raise WorkerEnded(message)
