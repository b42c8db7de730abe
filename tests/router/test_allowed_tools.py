"""OpenAI's ``allowed_tools``: of the tools that a request names the model may call some."""

from __future__ import annotations

import pytest

from rose_router.http.dialects import chat
from tests.router.scripts import Follows, folder
from tests.router.test_agents import FUNCTION, Json, Staging, ask, user

OTHER = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_of_allowed_tools_the_model_is_shown_those_alone(stage: Staging, path: str) -> None:
    def body(tools: list[Json], choice: object = None) -> Json:
        if path == "/v1/responses":
            return {"input": "Look.", "tools": tools, "tool_choice": choice}
        named = [{"type": "function", "function": {**one, "type": None}} for one in tools]
        return {"messages": [user("Look.")], "tools": named, "tool_choice": choice}

    def allow(name: str, mode: str = "auto") -> Json:
        inner: Json = {"mode": mode, "tools": [{"type": "function", "name": name}]}
        if path == "/v1/responses":
            return {"type": "allowed_tools", **inner}
        inner["tools"] = [{"type": "function", "function": {"name": name}}]
        return {"type": "allowed_tools", "allowed_tools": inner}

    async with stage(tokenizer=folder()) as s:
        await s.engine(script=Follows())
        one = await ask(s, path, body([FUNCTION]))
        allowed = await ask(s, path, body([FUNCTION, OTHER], allow("bash")))
        both = await ask(s, path, body([FUNCTION, OTHER]))
        refused = []
        for choice in (allow("nothing"), allow("bash", "sometimes"), allow("none", "required")):
            async with s.post(path, body([FUNCTION, OTHER], choice)) as reply:
                refused.append((reply.status, (await reply.json())["error"]["message"]))
    name = "input_tokens" if path == "/v1/responses" else "prompt_tokens"
    assert allowed["usage"][name] == one["usage"][name] < both["usage"][name]
    assert all(status == 400 and "tool_choice" in why for status, why in refused), refused


def test_of_allowed_tools_one_is_called_where_it_must_be() -> None:
    tools = [{"type": "function", "function": {"name": one}} for one in ("a", "b", "c")]
    choice = {"mode": "required", "tools": tools[1:]}
    body = {"tools": tools, "tool_choice": {"type": "allowed_tools", "allowed_tools": choice}}
    assert chat.forced_by(body) == ("b", "c")
