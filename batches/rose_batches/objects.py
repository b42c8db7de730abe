"""Files and batches as they are kept, and as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

import msgspec

from rose_core.unreadable import UNREADABLE

LIVE = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
"""Statuses of batches that have not ended."""
# Characters that readers of text take for the end of a line, Python's ``splitlines`` among them.
_LINE_ENDS = [
    (char.encode(), f"\\u{ord(char):04x}".encode()) for char in ("\x85", "\u2028", "\u2029")
]


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a tenant; its bytes lie beside the database under its id.

    Attributes:
        created, expires: Unix seconds.
        purpose: ``batch``, or ``batch_output`` of what batches write.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created: int
    expires: int
    sha256: str

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created,
            "expires_at": self.expires,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of a tenant.

    Attributes:
        moments: Unix seconds at which it first came to a status, by OpenAI's field (``failed_at``).
        errors: problems of its file.
        total, answered, failed: lines.
        output_file, error_file: ids; empty = there is none (yet).
    """

    id: str
    tenant: str
    endpoint: str
    input_file: str
    window: str
    status: str
    created: int
    deadline: int
    metadata: dict[str, str] = {}
    moments: dict[str, int] = {}
    errors: list[dict[str, Any]] = []
    total: int = 0
    answered: int = 0
    failed: int = 0
    output_file: str = ""
    error_file: str = ""

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling")
        errors = {"object": "list", "data": self.errors} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": self.output_file or None,
            "error_file_id": self.error_file or None,
            "created_at": self.created,
            "expires_at": self.deadline,
            **{f"{name}_at": self.moments.get(f"{name}_at") for name in (*names, "cancelled")},
            "request_counts": {
                "total": self.total,
                "completed": self.answered,
                "failed": self.failed,
            },
            "metadata": self.metadata or None,
        }

    def with_status(self, status: str, now: float) -> StoredBatch:
        """The same batch, come to another status; the first time that it came there is kept."""
        moments = {f"{status}_at": int(now)} | self.moments
        return msgspec.structs.replace(self, status=status, moments=moments)


def output_line(
    name: str,
    custom_id: str,
    *,
    response: tuple[int, bytes] | None = None,
    error: tuple[str, str] | None = None,
) -> bytes:
    """A line of an output or error file, with its end.

    Args:
        name: of the request.
        custom_id: what the tenant calls it.
        response: status and body of the router's answer.
        error: code and message where there is none.
    """
    answer: dict[str, Any] | None = None
    if response is not None:
        status, raw = response
        try:
            body = msgspec.json.decode(raw)
        except UNREADABLE:
            body = {"error": {"message": raw.decode(errors="replace")}}
        answer = {"status_code": status, "request_id": name, "body": body}
    line = {
        "id": f"batch_req_{name.removeprefix('batch_')}",
        "custom_id": custom_id,
        "response": answer,
        "error": None if error is None else {"code": error[0], "message": error[1]},
    }
    written = msgspec.json.encode(line)
    for raw, escaped in _LINE_ENDS:
        written = written.replace(raw, escaped)
    return written + b"\n"
