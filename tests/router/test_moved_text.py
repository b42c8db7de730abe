"""The text of a turn that moved: whatever a stream has shown stays as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from rose_engines.fake.model import continuation
from rose_router.http.replies.parts import text_of
from rose_router.http.tokenizer.tokenization import Tokenizer
from tests.router.world import SimEngine, V, over, started, world

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

PROMPT = (3, 1, 4)


class Bytes:
    """A tokenizer of one byte for every token, so that characters come in parts."""

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        assert skip_special
        return bytes(tokens).decode(errors="replace")


async def test_a_character_that_is_not_whole_yet_is_not_shown() -> None:
    letters = cast("Tokenizer", Bytes())
    whole = letters.decode(continuation(PROMPT, 300, V(0)))
    assert any(ord(letter) > 127 and letter != "\ufffd" for letter in whole)
    first, second = SimEngine("a"), SimEngine("b")
    seen: list[str] = []
    async with world(first) as w:
        turn = w.ask(300, prompt=PROMPT)
        await started(turn)
        w.attach(second)
        w.kill(first)
        while not turn.is_over:
            await turn.changed.wait()
            if not turn.transcript.exact_text:
                seen.append(text_of(turn, turn.shown(), letters))
        await over(turn)
    assert len(turn.moves) == 1
    assert len(seen) > 100
    assert seen[-1] == whole
    assert all(whole.startswith(one) for one in seen)
