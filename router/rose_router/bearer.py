"""Who may call: bearer tokens of a lease, from a file that a Secret is mounted as.

The file holds one token per line and is read again when it has changed, so a token is replaced by
writing the new one beside the old one, moving the callers, and removing the old one. A line may
begin with the name of a job: then the token's turns are that job's, which no hint can change, and
it ends no other job's turns.
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from rose_router.errors import NotAllowed

ENVIRONMENT = "ROSE_TURN_TOKEN"
JOB = web.RequestKey("job", str)
"""Key of a request under which the job of its token is found."""

_LOOK_SECONDS = 2.0

# Probes and scrapers bring no token; these pages say nothing about turns.
OPEN_PATHS = frozenset(
    {"/metrics", "/healthz", "/health", "/health_generate", "/ready"}
    | {"/ping", "/liveness", "/readiness"}
)


class Tokens:
    """The tokens that are good now.

    Args:
        file: one token per line; ``None`` = the environment's ``ROSE_TURN_TOKEN``, else nobody is
            asked.
        given: a token beside the file's.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is there but holds no token; then nobody could call, or anybody.
    """

    def __init__(self, file: Path | None = None, given: str = "") -> None:
        self._file = file
        self._fixed = [given] if given else []
        if file is None and os.environ.get(ENVIRONMENT):
            self._fixed.append(os.environ[ENVIRONMENT])
        self._looked = -_LOOK_SECONDS
        self._changed = 0
        self._tokens: list[tuple[bytes, str]] = [(token.encode(), "") for token in self._fixed]
        if file is not None:
            self._read(file)

    @property
    def asked(self) -> bool:
        """Whether callers must bring one."""
        return bool(self._tokens)

    def good(self, authorization: str) -> bool:
        """Whether this ``Authorization`` header is one of them."""
        return self.job_of(authorization) is not None

    def job_of(self, authorization: str) -> str | None:
        """The job that this ``Authorization`` header names, empty for none; ``None``: no token."""
        self._refresh()
        scheme, _, token = authorization.partition(" ")
        given = token.strip().encode(errors="replace")
        # All are compared, always: the time taken tells nothing.
        jobs = [job for known, job in self._tokens if hmac.compare_digest(given, known)]
        return jobs[0] if jobs and scheme.lower() == "bearer" else None

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        try:
            if self._file.stat().st_mtime_ns != self._changed:
                self._read(self._file)
        except (OSError, ValueError):
            return  # the Secret is being replaced; the tokens known stay good

    def _read(self, file: Path) -> None:
        changed = file.stat().st_mtime_ns
        try:
            lines = [line.split() for line in file.read_text().splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} holds no text; write one token per line") from error
        if not lines:
            message = f"{file} holds no token; write one per line"
            raise ValueError(message)
        for number, line in enumerate(lines, 1):
            if len(line) > 2:
                message = f"{file}, token {number}: expected TOKEN or JOB TOKEN"
                raise ValueError(message)
        found = [(line[-1], line[0] if len(line) == 2 else "") for line in lines]
        given = [(token, "") for token in self._fixed] + found
        self._tokens = [(token.encode(), job) for token, job in given]
        self._changed = changed


def middleware(tokens: Tokens) -> Middleware:
    """Asks every caller for a token, probes and scrapers excepted."""

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if tokens.asked and request.path not in OPEN_PATHS:
            job = tokens.job_of(request.headers.get("Authorization", ""))
            if job is None:
                message = "bearer token missing or wrong; send Authorization: Bearer TOKEN"
                raise NotAllowed("NotAllowed", message)
            request[JOB] = job
        return await handler(request)

    return check
