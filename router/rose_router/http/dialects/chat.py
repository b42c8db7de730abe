"""OpenAI's ``POST /v1/chat/completions``, with token ids beside the words.

The prompt is what the model's own chat template makes of ``messages`` and ``tools``, or the token
ids in ``input_ids`` where the caller keeps them itself (then nothing is ever tokenized twice). The
answer's ids, log-probs and versions come back as in ``/v1/completions``. Calls of tools written as
``<tool_call>{...}</tool_call>`` (Qwen, Hermes) are read when the request names tools. Calls that a
request forces (``tool_choice: required``, or one by name) come by a grammar: the answer is then a
JSON list of calls and nothing else. A turn under a grammar cannot move, so it runs on dedicated
engines, as any with ``response_format`` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn

import msgspec

from rose_core.rollouts.errors import InvalidTurn
from rose_core.rollouts.requests.shown import shown
from rose_router.http.conversations.conversation import Message, begun, messages_of
from rose_router.http.conversations.history import Conversation, History
from rose_router.http.dialects import openai
from rose_router.http.dialects.common import Count, Hints, Rank, Rid, read_as, token_ids
from rose_router.http.dialects.terms import Answers, ParsedRequest, PromptTerms
from rose_router.http.tokenizer.tokenization import Tokenizer

TOOL_BEGINS = "<tool_call>"
TOOL_ENDS = "</tool_call>"
_DEFAULT_TOKENS = 2048
"""Where nobody has said how long an answer may become."""


_ANYTHING = {"type": "object"}


class ChatRequest(msgspec.Struct):
    """What of a request is read here; sampling parameters are ``openai``'s.

    The messages are ``conversation``'s: templates get them as they came.
    """

    n: Answers | None = None
    stream: bool | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | int | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=128)] | None = None
    rid: Rid | None = None
    request_id: Rid | None = None
    priority: Rank | None = None


class Shown(msgspec.Struct):
    """What a template is given beside the messages.

    Attributes:
        tools: as they came.
        tool_choice: whether the model may call; ``forced_by`` reads what it must call.
    """

    input_ids: object = None
    messages: object = None
    tools: list[object] | None = None
    tool_choice: object = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: object = None
    reasoning_effort: object = None
    continue_final_message: bool | None = None

    def tools_shown(self) -> list[object]:
        """A model that is shown tools calls them, and nobody would read the call."""
        if self.tool_choice == "none" or not self.tools:
            return []
        allowed = _allowed(self.tool_choice)
        if allowed is None or allowed[0] == "required":  # whose grammar leaves out the others
            return self.tools
        return [one for one in self.tools if allowed[1].intersection(_names([one]))]

    def variables(self) -> dict[str, Any]:
        """What the template gets beside the conversation."""
        named = {
            "add_generation_prompt": self.add_generation_prompt,
            "reasoning_effort": self.reasoning_effort,
        }
        given = {name: value for name, value in named.items() if value is not None}
        return given | (self.chat_template_kwargs or {})


def read(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    tokenizer: Tokenizer | None,
    new_rid: Callable[[], str],
    *,
    context: int = 0,
    history: History | None = None,
    job: str | None = None,
) -> ParsedRequest:
    """Read a request.

    Args:
        body: of the request.
        headers: of the request.
        tokenizer: None = only token ids are taken.
        new_rid: names turns that the caller has not named.
        context: tokens of prompt and answer that the lease's engines bear; 0 = unknown.
        history: what is known of conversations; ``None`` = every prompt is rendered whole.
        job: whose the conversation is; ``None`` = as the request says.

    Raises:
        InvalidTurn: something is wrong with it; names the field.
    """
    openai.refuse(body)
    forced = forced_by(body)
    request, shown, hints = read_as(body, ChatRequest), read_as(body, Shown), Hints(body, headers)
    answers = request.n or 1
    talk = _conversation(shown, hints, history, job)
    prompt = _prompt(shown, tokenizer) if talk is None else talk.ids
    own = request.rid or request.request_id
    rid = own or new_rid()
    asked = ((f"{rid}_{answer}" if answers > 1 else rid, prompt) for answer in range(answers))
    most = request.max_completion_tokens or request.max_tokens
    terms = PromptTerms(
        hints,
        openai.sampling_of(
            {**body, **_forcing(body, forced)},
            most or openai.to_the_end(prompt, context, _DEFAULT_TOKENS),
            tokenizer,
        ),
        openai.passed_of(body) | _logprobs(request, recorded=talk is not None),
        priority=request.priority or 0,
        tokenizer=tokenizer,
    )
    found = talk.session if talk is not None else ""
    return ParsedRequest(
        terms.turns(asked, own_rid=own is not None, session=found),
        bool(request.stream),
        listed=True,
        conversation=talk,
        recorded=talk is not None,
        session=hints.session or found,
        session_by=hints.session_by or ("messages" if found else ""),
    )


def prompt_of(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    tokenizer: Tokenizer | None,
    *,
    history: History | None = None,
    job: str | None = None,
) -> tuple[int, ...]:
    """The prompt of a conversation, as a turn that asks with it has it; arguments as of ``read``.

    Raises:
        InvalidTurn: it is malformed, or there is no tokenizer.
    """
    shown = read_as(body, Shown)
    talk = _conversation(shown, Hints(body, headers), history, job)
    return _prompt(shown, tokenizer) if talk is None else talk.ids


def _prompt(shown: Shown, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if shown.input_ids is not None:
        return token_ids(shown.input_ids, "input_ids")
    messages, beginning = _messages(shown)
    if tokenizer is None:
        message = "messages: this router has no tokenizer; send token ids as input_ids"
        raise InvalidTurn(message)
    ids = tokenizer.chat(messages, shown.tools_shown(), shown.variables())
    ids += tokenizer.encode(beginning, special=False) if beginning else []
    return token_ids(ids, "messages")


def _messages(shown: Shown) -> tuple[list[Message], str]:
    """The conversation, and the beginning of its answer."""
    return begun(messages_of(shown.messages), goes_on=bool(shown.continue_final_message))


def _conversation(
    shown: Shown, hints: Hints, history: History | None, job: str | None
) -> Conversation | None:
    """The prompt, and which of its tokens were sampled here; None: it is rendered whole."""
    if history is None or not hints.record or shown.input_ids is not None:
        return None
    messages, beginning = _messages(shown)
    tools, variables = shown.tools_shown(), shown.variables()
    whose = hints.job if job is None else job
    return history.prompt(whose, hints.session, messages, tools, variables, begun=beginning)


def _forcing(body: Mapping[str, Any], forced: tuple[str, ...] | None) -> dict[str, Any]:
    if forced is None:
        return {}
    schema = {"schema": schema_of(body, forced)}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _logprobs(asked: ChatRequest, *, recorded: bool) -> dict[str, Any]:
    if not asked.logprobs:
        # A training row has them, whoever asked for the answer.
        return {"return_logprob": True, "top_logprobs_num": 0} if recorded else {}
    return {"return_logprob": True, "top_logprobs_num": asked.top_logprobs or 0}


def message_of(text: str, body: Mapping[str, Any], rid: str) -> dict[str, Any]:
    """The assistant's message: words, and the calls of tools among them when tools were named."""
    if not body.get("tools") or body.get("tool_choice") == "none":
        return {"role": "assistant", "content": text}
    if forced_by(body) is not None:
        calls, texts = calls_of(text), ""
    else:
        calls, texts = _called(text)
    if body.get("parallel_tool_calls") is False:
        del calls[1:]  # as vLLM does: a harness that asks so has no place for another
    if not calls:
        return {"role": "assistant", "content": text}
    named = [{"id": f"call_{rid}_{number}", **call} for number, call in enumerate(calls)]
    return {"role": "assistant", "content": texts or None, "tool_calls": named}


def _called(text: str) -> tuple[list[dict[str, Any]], str]:
    """Calls, and the words around them; what is no call stays among the words."""
    calls, texts, place = [], [], 0
    while (begun := text.find(TOOL_BEGINS, place)) >= 0:
        ended = text.find(TOOL_ENDS, begun)
        if ended < 0:
            break
        call = _call(text[begun + len(TOOL_BEGINS) : ended])
        ended += len(TOOL_ENDS)
        texts.append(text[place : begun if call else ended])
        calls += [call] if call else []
        place = ended
    texts.append(text[place:])
    # What a stream has shown already stays as it is: words up to the first call.
    return calls, "\n".join(filter(None, (one.rstrip() for one in texts)))


def _call(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None  # stays in the text, where the caller sees what the model wrote
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = json.dumps(found.get("arguments", {}), ensure_ascii=False)
    function = {"name": whole_text(found["name"]), "arguments": whole_text(arguments)}
    return {"type": "function", "function": function}


def _no_number(constant: str) -> NoReturn:
    """NaN and the infinities are no JSON, and no client reads them."""
    raise ValueError(constant)


def whole_text(text: str) -> str:
    """The text without halves of characters, which JSON may escape and no reply can hold."""
    return text.encode("utf-8", "replace").decode()


def shown_text(text: str, body: Mapping[str, Any]) -> str:
    """What of a growing answer may be streamed as words: nothing that may become a tool's call."""
    if not body.get("tools"):
        return text
    if forced_by(body) is not None:
        return ""
    cut = text.find(TOOL_BEGINS)
    if cut >= 0:
        return text[:cut].rstrip()
    begun = next((n for n in range(len(TOOL_BEGINS), 0, -1) if text.endswith(TOOL_BEGINS[:n])), 0)
    return text[: len(text) - begun].rstrip()


def forced_by(body: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Names of the tools of which one must be called; ``None`` = none must.

    Raises:
        InvalidTurn: ``tool_choice`` is nothing that OpenAI's clients send, or names no tool.
    """
    asked = body.get("tool_choice")
    if asked in (None, "auto", "none"):
        return None
    names = tuple(_names(body.get("tools")))
    allowed = _allowed(asked)
    if allowed is not None and allowed[0] == "auto" and allowed[1].intersection(names):
        return None
    match asked:
        case "required":
            chosen = names
        case _ if allowed is not None:
            chosen = tuple(one for one in names if one in allowed[1])
        case {"type": "function", "function": {"name": str(name)}}:
            chosen = tuple(one for one in names if one == name)
        case _:
            message = (
                "tool_choice: expected auto, none, required, {type: function, function: {name}} or "
                f"{{type: allowed_tools, allowed_tools: {{mode, tools}}}}, got {shown(asked)}"
            )
            raise InvalidTurn(message)
    if not chosen:
        message = f"tool_choice: {shown(asked)} must be called, and tools has no such function"
        raise InvalidTurn(message)
    if body.get("response_format"):
        message = "tool_choice: a forced call and a response_format exclude each other"
        raise InvalidTurn(message)
    return chosen


def _allowed(choice: object) -> tuple[str, frozenset[str]] | None:
    """OpenAI's ``allowed_tools``: whether one must be called, and names; ``None`` = no such."""
    match choice:
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)},
        }:
            return mode, frozenset(_names(tools))
    return None


def schema_of(body: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of an answer that calls one of the tools, or several."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [function["name"]]},
                "parameters": function.get("parameters") or _ANYTHING,
            },
            "required": ["name", "parameters"],
        }
        for function in _functions(body.get("tools"))
        if function["name"] in names
    ]
    made: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if body.get("parallel_tool_calls") is False:
        made["maxItems"] = 1
    return made


def calls_of(text: str) -> list[dict[str, Any]]:
    """The calls of such an answer, in OpenAI's form; none where it was cut short."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    listed = found if isinstance(found, list) else []
    return [
        {
            "type": "function",
            "function": {
                "name": one["name"],
                "arguments": json.dumps(one.get("parameters", {}), ensure_ascii=False),
            },
        }
        for one in listed
        if isinstance(one, dict) and isinstance(one.get("name"), str)
    ]


def _names(tools: object) -> list[str]:
    return [function["name"] for function in _functions(tools)]


def _functions(tools: object) -> list[dict[str, Any]]:
    found = tools if isinstance(tools, list) else []
    functions = [one.get("function") for one in found if isinstance(one, dict)]
    return [one for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str)]
