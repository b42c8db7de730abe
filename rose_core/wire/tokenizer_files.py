"""Engine host -> router: what turns text into token ids, and chats into text, as the model has it.

A node has the model's folder, and a router has none: the host names a digest of these files with
each engine (``EngineStatus.tokenizer``), and routers that have no tokenizer fetch them by it,
``GET /slots/UID/tokenizer`` with the slot's token. They come with the model, so nobody believes
them: names and sizes are bounded, and a frame is taken for what its digest says or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from rose_core.unreadable import UNREADABLE

TOKENIZER = "tokenizer.json"
MIB = 1 << 20

MOST_OF: Mapping[str, int] = {
    TOKENIZER: 48 * MIB,  # that of Gemma 3, one of the largest, has 33 MB
    "tokenizer_config.json": 8 * MIB,  # it may list every added token again
    "chat_template.jinja": MIB,
    "generation_config.json": MIB,
}
"""The files that travel, and the most bytes of each."""

MOST_BYTES = sum(MOST_OF.values()) + MIB
"""Of a frame; the last one is for names and lengths."""


class BadTokenizerFiles(Exception):
    """A frame is not what its digest says, or holds what no model needs."""


class _Frame(msgspec.Struct):
    files: dict[str, bytes]


def pack(files: Mapping[str, bytes]) -> bytes:
    """Files as a frame: the same bytes for the same files, whoever packs them."""
    return msgspec.msgpack.encode(_Frame(dict(sorted(files.items()))))


def digest(frame: bytes) -> str:
    """Name of a frame: SHA-256, 64 hexadecimal digits."""
    return hashlib.sha256(frame).hexdigest()


def unpack(frame: bytes, named: str) -> dict[str, bytes]:
    """The files of a frame.

    Args:
        frame: as it came.
        named: the digest it was asked for by.

    Raises:
        BadTokenizerFiles: it is another frame, or no frame within the bounds.
    """
    if len(frame) > MOST_BYTES:
        message = f"tokenizer files of {len(frame)} bytes, and {MOST_BYTES} are taken at most"
        raise BadTokenizerFiles(message)
    found = digest(frame)
    if found != named:
        message = f"tokenizer files {named:.12} were asked for, and what came is {found:.12}"
        raise BadTokenizerFiles(message)
    try:
        files = msgspec.msgpack.decode(frame, type=_Frame).files
    except UNREADABLE as error:
        message = f"tokenizer files {named:.12}: {error}"
        raise BadTokenizerFiles(message) from error
    for name, content in files.items():
        if len(content) > MOST_OF.get(name, -1):
            message = f"tokenizer files {named:.12}: {name!r:.60} is none, or too large"
            raise BadTokenizerFiles(message)
    if TOKENIZER not in files:
        message = f"tokenizer files {named:.12}: there is no {TOKENIZER} among them"
        raise BadTokenizerFiles(message)
    return files
