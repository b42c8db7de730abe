"""Text in and out, only where the lease brings a tokenizer; token ids are the truth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rose_router.errors import BadRequest


class Tokenizer:
    """A ``tokenizer.json``.

    Args:
        path: the file, or the folder it stands in.

    Raises:
        BadRequest: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers  # noqa: PLC0415  # only where text is asked for

        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            message = f"{file}: no such tokenizer; --tokenizer wants a tokenizer.json or its folder"
            raise BadRequest("NoTokenizer", message)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        """Text to token ids, with the special tokens the tokenizer adds by itself."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Token ids to text."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special))
