"""OpenAI's routes of files and batches, as the lease's router passes them on.

The router says who calls (``X-Rose-Tenant``), and proves by its token that it is the router. A
tenant sees what it made itself, and nothing of anybody else.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from rose_batches import metrics
from rose_batches.errors import BadBatch
from rose_batches.objects import LIVE, StoredBatch, StoredFile
from rose_batches.worker import Worker
from rose_core.batches.lines import ENDPOINTS
from rose_core.batches.schedule import seconds_of
from rose_core.unreadable import UNREADABLE
from rose_wire import observability

TENANT = "X-Rose-Tenant"
MOST_FILE_BYTES = 200 << 20
_MOST_FILES, _MOST_BATCHES, _MOST_LIVE = 1000, 1000, 100
_UPLOAD_SECONDS = 600.0
_FIELD_BYTES, _PIECE = 1024, 1 << 16
_BODY_BYTES = 64 << 10
_MOST_LISTED = 100
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
One = TypeVar("One", StoredFile, StoredBatch)


class _BatchRequest(msgspec.Struct):
    """The body of ``POST /v1/batches``."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


@dataclass
class _Upload:
    """A file that comes."""

    file: IO[bytes]
    filename: str = "batch.jsonl"
    purpose: str = ""
    digest: str = ""
    bytes: int = -1


def application(worker: Worker, token: str = "") -> web.Application:
    """The routes.

    Args:
        worker: runs batches.
        token: that the router shows; empty = whoever reaches this port is believed.
    """
    pages = _Routes(worker)
    app = web.Application(client_max_size=_BODY_BYTES, middlewares=[_guarded(token)])
    app.add_routes(observability.pages(metrics.REGISTRY))
    app.add_routes(
        [
            web.post("/v1/files", pages.upload),
            web.get("/v1/files", pages.files),
            web.get("/v1/files/{id}", pages.file),
            web.delete("/v1/files/{id}", pages.remove),
            web.get("/v1/files/{id}/content", pages.content),
            web.post("/v1/batches", pages.create),
            web.get("/v1/batches", pages.batches),
            web.get("/v1/batches/{id}", pages.batch),
            web.post("/v1/batches/{id}/cancel", pages.cancel),
        ]
    )
    return app


def _guarded(token: str) -> Middleware:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in {"/metrics", "/healthz"}:
            return await handler(request)
        if token and not observability.brings(request, token):
            return _error_response(
                401, "only the lease's router is heard here; ask its URL", "not_allowed"
            )
        try:
            _check_tenant(request)
            return await handler(request)
        except BadBatch as error:
            return _error_response(error.status, str(error), error.code, error.param)
        except web.HTTPException as error:
            return _error_response(error.status, error.reason, "invalid_request")

    return guard


def _check_tenant(request: web.Request) -> None:
    if not request.headers.get(TENANT):
        message = f"{TENANT} is missing: ask the lease's router, which says who calls"
        raise BadBatch(message, "no_tenant")


def _error_response(status: int, message: str, code: str, param: str | None = None) -> web.Response:
    kind = "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return web.json_response({"error": error}, status=status)


class _Routes:
    """The handlers."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._journal = worker, worker.journal
        self._coming: dict[str, int] = {}

    # Files ------------------------------------------------------------------------------------

    async def upload(self, request: web.Request) -> web.Response:
        """Keep a file; it counts once its last byte is on the disk."""
        tenant = request.headers[TENANT]
        if len(await self._worker.do(self._journal.files, tenant)) >= _MOST_FILES:
            message = f"you have {_MOST_FILES} files already; delete some"
            raise BadBatch(message, "too_many_files")
        if tenant in self._coming:
            message = "another file of yours is coming; send one after the other"
            raise BadBatch(message, "upload_under_way", status=429)
        self._coming[tenant] = 0
        upload = _Upload(await self._worker.do(self._journal.begin))
        try:
            async with asyncio.timeout(_UPLOAD_SECONDS):
                await self._receive(request, upload, tenant)
            now = int(self._worker.clock())
            file = StoredFile(
                id=f"file-{uuid.uuid4().hex}",
                tenant=tenant,
                filename=upload.filename,
                purpose="batch",
                bytes=upload.bytes,
                created=now,
                expires=now + self._worker.keep_seconds,
                sha256=upload.digest,
            )
            await self._worker.do(self._journal.add, file, Path(upload.file.name))
        except TimeoutError as error:
            message = f"the file did not come within {_UPLOAD_SECONDS:g} s; send it in parts"
            raise BadBatch(message, "too_slow", status=408) from error
        finally:
            del self._coming[tenant]
            await asyncio.to_thread(_discard, upload.file)
        return web.json_response(file.shown())

    async def _receive(self, request: web.Request, upload: _Upload, tenant: str) -> None:
        """Read the form; the file's bytes go to the disk as they come."""
        if not request.content_type.startswith("multipart/"):
            message = "send the file as multipart/form-data with the fields purpose and file"
            raise BadBatch(message, "no_form")
        try:
            async for part in await request.multipart():
                await self._receive_part(part, upload, tenant)
        except (ValueError, AssertionError) as error:  # what aiohttp raises for torn forms
            raise BadBatch(f"the form cannot be read: {error}", "no_form") from error
        if upload.purpose != "batch":
            message = f"purpose {upload.purpose!r:.100}: expected batch"
            raise BadBatch(message, "wrong_purpose", param="purpose")
        if upload.bytes < 0:
            raise BadBatch("the form has no field file", "no_file", param="file")

    async def _receive_part(self, part: object, upload: _Upload, tenant: str) -> None:
        """Read one field of the form; those that have no name here are passed over."""
        if not isinstance(part, aiohttp.BodyPartReader):
            raise BadBatch("a form inside a form; send the fields themselves", "no_form")
        if part.name == "file":
            if upload.bytes >= 0:  # it was counted, and another would not be
                message = "the form has two fields file; send each file by itself"
                raise BadBatch(message, "two_files", param="file")
            await self._receive_file(part, upload, tenant)
            return
        if part.name == "purpose":
            upload.purpose = (await part.read_chunk(_FIELD_BYTES)).decode(errors="replace")
        await part.release()

    async def _receive_file(
        self, part: aiohttp.BodyPartReader, upload: _Upload, tenant: str
    ) -> None:
        upload.filename = (part.filename or upload.filename)[:255]
        digest, size = hashlib.sha256(), 0
        while piece := await part.read_chunk(_PIECE):
            size += len(piece)
            self._coming[tenant] = size
            if size > MOST_FILE_BYTES:
                message = f"the file has more than {MOST_FILE_BYTES} bytes; send it as several"
                raise BadBatch(message, "file_too_large", status=413, param="file")
            if self._worker.room(tenant, self._coming) < 0:
                message = "your files and answers hold all that they may; delete some files"
                raise BadBatch(message, "storage_exceeded", param="file")
            digest.update(piece)
            await asyncio.to_thread(upload.file.write, piece)
        await asyncio.to_thread(_flush, upload.file)
        upload.digest, upload.bytes = digest.hexdigest(), size

    async def files(self, request: web.Request) -> web.Response:
        """The tenant's files."""
        found = await self._worker.do(self._journal.files, request.headers[TENANT])
        purpose = request.query.get("purpose", "")
        return _listed([one for one in found if purpose in {"", one.purpose}], request)

    async def file(self, request: web.Request) -> web.Response:
        """One of them."""
        return web.json_response((await self._file(request)).shown())

    async def remove(self, request: web.Request) -> web.Response:
        """Forget one of them."""
        file = await self._file(request)
        await self._worker.do(self._journal.remove, file)
        return web.json_response({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: web.Request) -> web.StreamResponse:
        """The bytes of one of them."""
        file = await self._file(request)
        kind = {"Content-Type": "application/octet-stream"}
        return web.FileResponse(self._journal.path(file.id), headers=kind)

    async def _file(self, request: web.Request) -> StoredFile:
        name, tenant = request.match_info["id"], request.headers[TENANT]
        return await self._worker.do(self._journal.file, name, tenant)

    # Batches ----------------------------------------------------------------------------------

    async def create(self, request: web.Request) -> web.Response:
        """Take a batch; its file is read afterwards, and what is wrong stands in its ``errors``."""
        tenant = request.headers[TENANT]
        try:
            asked = msgspec.json.decode(await request.read(), type=_BatchRequest)
            seconds = seconds_of(asked.completion_window)
        except (*UNREADABLE, ValueError) as error:
            raise BadBatch(str(error), "invalid_request") from error
        if asked.endpoint not in ENDPOINTS:
            message = f"endpoint {asked.endpoint!r:.100} is none of {', '.join(ENDPOINTS)}"
            raise BadBatch(message, "invalid_endpoint", param="endpoint")
        file = await self._worker.do(self._journal.file, asked.input_file_id, tenant)
        if file.purpose != "batch":
            message = f"{file.id} is what a batch wrote; expected a file of purpose batch"
            raise BadBatch(message, "wrong_purpose", param="input_file_id")
        every = await self._worker.do(self._journal.batches, tenant)
        if sum(one.status in LIVE for one in every) >= _MOST_LIVE:
            message = f"{_MOST_LIVE} batches of yours have not ended; wait for one, or cancel it"
            raise BadBatch(message, "too_many_batches", status=429)
        now = self._worker.clock()
        batch = StoredBatch(
            id=f"batch_{uuid.uuid4().hex}",
            tenant=tenant,
            endpoint=asked.endpoint,
            input_file=file.id,
            window=asked.completion_window,
            status="validating",
            created=int(now),
            deadline=int(now) + seconds,
            metadata=asked.metadata or {},
        )
        await self._worker.create(batch)
        await self._worker.do(self._journal.forget, tenant, _MOST_BATCHES)
        return web.json_response(batch.shown())

    async def batches(self, request: web.Request) -> web.Response:
        """The tenant's batches."""
        found = await self._worker.do(self._journal.batches, request.headers[TENANT])
        return _listed(found, request)

    async def batch(self, request: web.Request) -> web.Response:
        """One of them."""
        return web.json_response((await self._batch(request)).shown())

    async def cancel(self, request: web.Request) -> web.Response:
        """Stop one of them."""
        stopped = await self._worker.cancel(await self._batch(request))
        return web.json_response(stopped.shown())

    async def _batch(self, request: web.Request) -> StoredBatch:
        name, tenant = request.match_info["id"], request.headers[TENANT]
        return await self._worker.do(self._journal.batch, name, tenant)


def _discard(file: IO[bytes]) -> None:
    file.close()
    Path(file.name).unlink(missing_ok=True)


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _listed(found: Sequence[One], request: web.Request) -> web.Response:
    """A page of them, as ``limit`` and ``after`` ask for."""
    try:
        limit = int(request.query.get("limit", "20"))
    except ValueError as error:
        raise BadBatch("limit: expected a whole number", "invalid_limit", param="limit") from error
    if request.query.get("order") == "asc":
        found = found[::-1]
    after = request.query.get("after")
    if after:
        place = next((n for n, one in enumerate(found) if one.id == after), None)
        if place is None:
            raise BadBatch(f"after: you have no {after!r:.100}", "invalid_after", param="after")
        found = found[place + 1 :]
    page = found[: max(1, min(limit, _MOST_LISTED))]
    body: dict[str, Any] = {
        "object": "list",
        "data": [one.shown() for one in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(page) < len(found),
    }
    return web.json_response(body)
