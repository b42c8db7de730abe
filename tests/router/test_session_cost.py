"""A turn of an agent does the work of its own round; counted, for time depends on machines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from rose_core.rollouts.conversations import message_tree
from rose_dev.models import scripted_recipe
from rose_dev.scripted import Script
from rose_router.http.tokenizer.templates import Template
from tests.router.conftest import Stage
from tests.router.scripts import Follows, call, folder

Staging = Callable[..., AbstractAsyncContextManager[Stage]]
TOOLS = [{"type": "function", "function": {"name": "bash"}}]
LOOP = scripted_recipe(
    "scripted-loop",
    Script("bash", ("I look." + call("bash", '{"command": "ls"}'), call("bash", "{}"))),
)
ASKED_AGAIN = 4
"""After so many rounds the user says something; that ends no agent's gain."""


class Counted:
    """Work done since the start.

    Attributes:
        rendered: characters that templates made.
        compared: messages whose words were looked at.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rendered = self.compared = 0
        render, fingerprint = Template.render, message_tree.fingerprint

        def rendering(template: Template, **names: Any) -> str:  # noqa: ANN401  # as the method
            text = render(template, **names)
            self.rendered += len(text)
            return text

        def comparing(message: dict[str, Any]) -> bytes:
            self.compared += 1
            return fingerprint(message)

        monkeypatch.setattr(Template, "render", rendering)
        monkeypatch.setattr(message_tree, "fingerprint", comparing)


async def run(s: Stage, name: str, turns: int) -> int:
    """A session of so many turns; characters of its messages."""
    talk: list[dict[str, Any]] = [{"role": "user", "content": "Write a file and read it."}]
    for turn in range(turns):
        asked = {"messages": talk, "tools": TOOLS, "max_tokens": 80, "rose": {"session": name}}
        async with s.post("/v1/chat/completions", asked) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
        history = answer["choices"][0]["rose"]["history"]
        new = 2 if turn == ASKED_AGAIN + 1 else 1
        assert history["known_messages"] == max(0, len(talk) - new), "the turn before is known"
        message = answer["choices"][0]["message"]
        found = {"role": "tool", "content": f"result {turn} " + "word " * 20}
        talk += [message, found | {"tool_call_id": message["tool_calls"][0]["id"]}]
        if turn == ASKED_AGAIN:
            talk.append({"role": "user", "content": "And now all of them."})
    return sum(len(str(one)) for one in talk)


async def test_a_session_costs_what_its_messages_are_long(
    stage: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tokenizer=folder(LOOP)) as s:
        await s.engine(script=Follows(LOOP), token_seconds=0.0001)
        await run(s, "first", 2)  # the template's trial
        spent = {}
        for turns in (40, 80):
            counted = Counted(monkeypatch)
            size = await run(s, f"of-{turns}", turns)
            spent[turns] = counted
            monkeypatch.undo()
            # Each message once when it comes, and once as the answer it was told as.
            assert counted.compared <= 3 * turns + 2
            assert counted.rendered < 16 * size
        # Twice the turns: about twice the work, where the square would be four times.
        assert spent[80].rendered < 2.6 * spent[40].rendered
        assert spent[80].compared < 2.1 * spent[40].compared
