"""Handlers of turn requests: read, submit, wait, answer; abort when the caller hangs up."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rose_core.rollouts.conversations.message_tree import KnownDigests, MessageTree, PrefixMatch
from rose_core.rollouts.errors import InvalidTurn, PromptTooLong
from rose_router import metrics
from rose_router.engines.engine_client import MOST_IDS, encoded_ids
from rose_router.errors import BadRequest, Forbidden, TurnLost
from rose_router.http.admission.bearer import caller_of
from rose_router.http.admission.bodies import (
    LARGE_BODIES,
    arrived,
    bytes_at_once,
    json_object,
    raw_body,
    read_body,
)
from rose_router.http.admission.memory import ROOM, held_by
from rose_router.http.conversations.conversation import Message, messages_of
from rose_router.http.conversations.history import Find, History
from rose_router.http.conversations.stored_responses import StoredResponses
from rose_router.http.dialects import chat, completions, messages, responses, sglang, vllm
from rose_router.http.dialects.common import Hints, encoded, token_ids
from rose_router.http.dialects.terms import ParsedRequest
from rose_router.http.replies import parts, response_replies
from rose_router.http.replies.bare_reply import JsonReply
from rose_router.http.replies.chat_replies import ChatReplies
from rose_router.http.replies.completion_replies import CompletionReplies
from rose_router.http.replies.generate_events import GenerateEvents
from rose_router.http.replies.message_replies import MessageReplies
from rose_router.http.replies.model_output import OutputReader
from rose_router.http.replies.parts import TokenNames
from rose_router.http.replies.response_replies import ResponseReplies
from rose_router.http.replies.streaming import (
    LINES,
    MARK,
    NAMED,
    PLAIN,
    Events,
    Framing,
    MergedStream,
    Stream,
)
from rose_router.http.tokenizer.model_tokenizer import ModelTokenizer
from rose_router.http.tokenizer.tokenization import Tokenizer
from rose_router.turns.request import TurnRequest
from rose_router.turns.service import Service, random_rid
from rose_router.turns.turn import Turn, TurnState, typed_abort

_LONG_BODY = 1 << 16
"""Bytes; a shorter one is read in about a millisecond, and a thread costs a tenth of that."""
_LONG_IDS = 1 << 18
"""The same of one prompt of ids without a word: 40,000 are read in a millisecond, where they were
decoded at once, too. On a busy machine a thread is waited for longer than that, twice."""
_WRITTEN_AHEAD = 1024
"""Ids of a prompt that an answer's first event repeats; more are written before the first token."""
_READERS = 2
"""Threads for long bodies: one that takes its template's whole budget stops no other."""
_FIND_SECONDS = 60.0  # a loop that ends answers nobody

_FAILED = TurnState.FAILED  # named once: an enum's member is slow to find

Made = TypeVar("Made")

_encode = msgspec.json.Encoder().encode


class TurnHandlers:
    """The handlers.

    Args:
        service: runs turns.
        model_tokenizer: the tokenizer, for text, as soon as it is known.
        tree: of what was sampled under which messages.
        stored: conversations behind responses.
    """

    def __init__(
        self,
        service: Service,
        model_tokenizer: ModelTokenizer,
        tree: MessageTree,
        stored: StoredResponses,
    ) -> None:
        self._service = service
        self._model_tokenizer = model_tokenizer
        self._readers = ThreadPoolExecutor(_READERS, "bodies")
        self._tree = tree
        self._known = KnownDigests()
        self._repeated = sglang.RepeatedRequests(random_rid)
        self._stored = stored

    @property
    def _tokenizer(self) -> Tokenizer | None:
        return self._model_tokenizer.current

    def _history(self, find: Find | None = None) -> History | None:
        tokenizer = self._tokenizer
        return None if tokenizer is None else History(self._tree, tokenizer, find, self._known)

    async def _history_for(self, request: web.Request) -> History | None:
        """For a request that a thread reads if it is long."""
        long = len(await raw_body(request)) > _LONG_BODY
        return self._history(self._find_from_thread() if long else None)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """SGLang's ``/generate``."""
        raw = bytes_at_once(request)
        ask = self._repeated.read(raw, request.headers) if raw is not None else None
        if ask is None:
            body = await self._read(request)
            reading = partial(sglang.read, body, request.headers, self._tokenizer, random_rid)
            ask = await self._off_loop(request, reading, body)
            if raw is not None:
                self._repeated.learn(raw, request.headers, ask)
        with self._turns(request, ask) as turns:
            if ask.stream and ask.listed:
                voices = [(turn, self._sglang_indexed(turn, n)) for n, turn in enumerate(turns)]
                return await self._stream_answers(request, voices, None)
            if ask.stream:
                return await self._stream(request, turns[0], self._sglang_events, LINES)
            await self._wait_all(turns)
            _raise_if_all_failed(turns)
            answers = [self._sglang_answer(turn) for turn in turns]
        return self._json(answers if ask.listed else answers[0])

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's ``/v1/completions``."""
        body = await self._read(request)
        reading = partial(completions.read, body, request.headers, self._tokenizer, random_rid)
        ask = await self._off_loop(request, reading, body)
        model = self._service.settings.model
        answering = CompletionReplies(model, self._tokenizer, self._names(body))
        with self._turns(request, ask) as turns:
            if ask.stream:
                # Engines have been asked, and what follows is done while they compute.
                prompts = await _written_prompts(turns)
                voices = [(t, answering.events(t, n, prompts[n][0])) for n, t in enumerate(turns)]
                counted = partial(answering.counted, turns) if ask.usage else None
                long = [pieces for _, pieces in prompts]
                return await self._stream_answers(request, voices, counted, long)
            await self._wait_all(turns)
            _raise_if_all_failed(turns)
            return await self._long_json(answering.answer(turns))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's ``/v1/chat/completions``."""
        body = await self._read(request)
        ask = await self._read_chat(request, body)
        answering = ChatReplies(
            self._service.settings.model, self._tokenizer, body, ask, self._names(body)
        )
        with self._turns(request, ask) as turns:
            message = partial(partial, answering.message)
            if ask.stream:
                voices = [
                    (turn, self._then_note(ask, turn, answering.events(turn, n), message(turn)))
                    for n, turn in enumerate(turns)
                ]
                counted = partial(answering.counted, turns) if len(turns) > 1 else None
                return await self._stream_answers(request, voices, counted)
            await self._wait_all(turns)
            _raise_if_all_failed(turns)
            for turn in turns:
                typed_abort(turn)
                self._note(ask, turn, answering.message(turn))
            return await self._long_json(answering.answer(turns))

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """Anthropic's ``/v1/messages``."""
        read = await self._off_loop(request, partial(messages.read, await self._read(request)))
        tokenizer = self._require_tokenizer()
        ask = await self._read_chat(request, read.chat)
        with self._turns(request, ask) as (turn,):
            reader = OutputReader(turn, tokenizer, read.chat)
            beside = partial(parts.conversation_json, turn, ask, read.not_shown)
            answering = MessageReplies(self._service.settings.model, turn, reader, beside)
            return await self._agent(request, ask, turn, answering)

    async def count_tokens(self, request: web.Request) -> JsonReply:
        """Anthropic's ``/v1/messages/count_tokens``."""
        read = await self._off_loop(request, partial(messages.read, await self._read(request)))
        self._require_tokenizer()
        return self._json({"input_tokens": len(await self._read_prompt(request, read.chat))})

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's ``/v1/responses``."""
        body = await self._read(request)
        tokenizer = self._require_tokenizer()
        job = _job_of(request)
        if job is None:
            job = Hints(body, request.headers).job
        previous = responses.previous_of(body)
        before = self._stored.find(job, previous) if previous else ()
        read = await self._off_loop(request, partial(responses.read, body, before))
        ask = await self._read_chat(request, read.chat)
        identity = f"resp_{secrets.token_hex(16)}"  # nobody else's can be guessed
        model = self._service.settings.model
        try:
            held = self._turns(request, ask)
        except PromptTooLong as error:
            if not ask.stream:
                raise
            metrics.REFUSED.labels(type(error).__name__).inc()
            events = response_replies.too_long_events(model, read, identity, error)
            return web.Response(body=NAMED.lines(events), content_type="text/event-stream")
        with held as (turn,):
            reader = OutputReader(turn, tokenizer, read.chat)
            beside = partial(parts.conversation_json, turn, ask, read.not_shown)
            answering = ResponseReplies(model, read, identity, turn, reader=reader, beside=beside)
            reply = await self._agent(request, ask, turn, answering)
            if read.asked.store is not False and turn.is_over and not turn.abandoned:
                history = messages_of(read.history) if read.history else []
                self._stored.keep(job, identity, [*history, answering.message()])
            return reply

    async def tokenize(self, request: web.Request) -> JsonReply:
        """``/tokenize``: text (``prompt``) or a conversation (``messages``) as token ids."""
        body = await self._read(request)
        if body.get("messages") is not None:
            ids = list(await self._read_prompt(request, body))
        else:
            special = body.get("add_special_tokens") is not False
            instead = "token ids everywhere"
            text = _prompt_text(body)
            arguments = (text, self._tokenizer, "prompt", instead)
            ids = list(await self._off_loop(request, partial(encoded, *arguments, special=special)))
        return self._json(
            {
                "tokens": ids,
                "count": len(ids),
                "max_model_len": self._service.bounds().context or None,
            }
        )

    async def detokenize(self, request: web.Request) -> JsonReply:
        """``/detokenize``: token ids (``tokens``) as text, special ones included."""
        body = await self._read(request)
        tokens, most = body.get("tokens"), self._service.bounds().context
        if most and isinstance(tokens, list) and len(tokens) > most:
            message = f"tokens: {len(tokens)} ids, and the context has {most}; send them in pieces"
            raise InvalidTurn(message)

        def text() -> str:
            return self._require_tokenizer().decode(token_ids(tokens, "tokens"), skip_special=False)

        if len(await raw_body(request)) <= _LONG_BODY:
            return self._json({"prompt": text()})
        # No thread: the tokenizer lets nothing else run while it decodes.
        return self._json({"prompt": await request.app[LARGE_BODIES].holds.hold(text)})

    async def inference(self, request: web.Request) -> web.StreamResponse:
        """VLLM's ``/inference/v1/generate``."""
        body = await self._read(request)
        reading = partial(
            vllm.read,
            body,
            request.headers,
            self._tokenizer,
            random_rid,
            context=self._service.bounds().context,
        )
        ask = await self._off_loop(request, reading, body)
        with self._turns(request, ask) as turns:
            if ask.stream:
                voices = [(turn, _vllm_events(turn, n)) for n, turn in enumerate(turns)]
                return await self._stream_answers(request, voices, None)
            await self._wait_all(turns)
            _raise_if_all_failed(turns)
            return self._json(_vllm_answer(turns))

    async def abort(self, request: web.Request) -> web.Response:
        """SGLang's ``/abort_request``: by exact id, or everything of this lease."""
        body = await self._read(request)
        caller = caller_of(request)
        job = caller.job or Hints(body, request.headers).job
        if body.get("abort_all") and caller.limited:
            raise Forbidden("TurnsOnly", "abort_all: this token is for turns only; give a rid")
        if body.get("abort_all"):
            self._service.abort_all(job)
        elif isinstance(body.get("rid"), str):
            self._service.abort(body["rid"], job)
        else:
            message = "give rid (text) or abort_all (true)"
            raise BadRequest("InvalidTurn", message)
        return web.Response()

    async def _read_chat(self, request: web.Request, body: Mapping[str, Any]) -> ParsedRequest:
        reading = partial(
            chat.read,
            body,
            request.headers,
            self._tokenizer,
            random_rid,
            context=self._service.bounds().context,
            history=await self._history_for(request),
            job=_job_of(request),
        )
        return await self._off_loop(request, reading)

    async def _read_prompt(self, request: web.Request, body: Mapping[str, Any]) -> tuple[int, ...]:
        """The ids that a turn of this conversation has, what was sampled here among them."""
        reading = partial(
            chat.prompt_of,
            body,
            request.headers,
            self._tokenizer,
            history=await self._history_for(request),
            job=_job_of(request),
        )
        return await self._off_loop(request, reading)

    async def _off_loop(
        self,
        request: web.Request,
        work: Callable[[], Made],
        body: Mapping[str, Any] | None = None,
    ) -> Made:
        """Do what a long body needs in a thread: no stream waits for it.

        Args:
            request: whose.
            work: is done.
            body: where its prompt may be ids.
        """
        size = len(arrived(request))
        ids = _LONG_BODY < size <= _LONG_IDS and body is not None and not _takes_long(body)
        if size <= _LONG_BODY or ids:
            return work()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, copy_context().run, work)

    def _find_from_thread(self) -> Find:
        """Asks the tree from another thread; the tree has one of its own, the loop's."""
        loop = asyncio.get_running_loop()

        def find(*asked: Any) -> PrefixMatch:  # noqa: ANN401  # of ``Find``
            async def found() -> PrefixMatch:
                return self._tree.find(*asked)

            answer = asyncio.run_coroutine_threadsafe(found(), loop)
            return answer.result(_FIND_SECONDS)

        return find

    async def _read(self, request: web.Request) -> dict[str, Any]:
        """The body; one with text in it is read on once there is a tokenizer, or will be none."""
        raw = bytes_at_once(request)
        body = await read_body(request) if raw is None else json_object(raw)
        if self._tokenizer is None and _needs_tokenizer(body):
            await self._model_tokenizer.wait(self._service.settings.queue.seconds)
        return body

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            why = self._model_tokenizer.missing()
            if not why:  # the body has no text that would have been waited for
                why = (
                    "no engine has brought the model's tokenizer yet; send what the route asks for"
                )
            raise BadRequest("NoTokenizer", why)
        return self._tokenizer

    async def _agent(
        self,
        request: web.Request,
        ask: ParsedRequest,
        turn: Turn,
        answering: MessageReplies | ResponseReplies,
    ) -> web.StreamResponse:
        """Answer an agent's harness."""
        if ask.stream:
            noting = self._then_note(ask, turn, answering.events(), answering.message)
            return await self._stream(request, turn, lambda _: noting, NAMED)
        await self._service.until_ended(turn)
        _raise_if_all_failed([turn])
        answer = answering.answer()
        self._note(ask, turn, answering.message())
        return self._json(answer)

    def _then_note(
        self, ask: ParsedRequest, turn: Turn, events: Iterable[Any], message: Callable[[], Message]
    ) -> Events:
        """The events; after the last one the turn is noted as it was told."""
        yield from events
        self._note(ask, turn, message())

    def _note(self, ask: ParsedRequest, turn: Turn, answer: Message) -> None:
        history = self._history()
        if ask.conversation is None or history is None:
            return
        owner = turn.request.job, ask.session or turn.request.rid
        semantics = parts.rose_json(turn, turn.shown().spans)["logprob_semantics"]
        by = ask.session_by or "rid"
        history.note(ask.conversation, owner, turn, answer, semantics, by=by)
        match = ask.conversation.match
        if match.altered_at is not None:
            metrics.HISTORY_ALTERED.inc()
            metrics.HISTORY_LOST_TOKENS.inc(match.lost_tokens)
        metrics.HISTORY_TURNS.set(len(self._tree))
        metrics.HISTORY_FORGOTTEN.set(self._tree.forgotten)

    def _turns(self, request: web.Request, ask: ParsedRequest) -> HeldTurns:
        """The turns asked for, each of its job."""
        job, service = _job_of(request), self._service
        if (room := request.get(ROOM)) is not None:
            room.resize(held_by(ask.turns))
        service.admit(ask.turns)
        interval = 1 if ask.stream else service.settings.interval
        at_once = len(ask.turns) == 1
        alone = at_once and not ask.stream
        held = HeldTurns(service)
        try:
            for one in ask.turns:
                asked = one.but(job="") if one.job else one
                if whose := one.job if job is None else job:
                    asked = asked.of_job(whose)
                if service.tracing is not None:
                    asked = _traced(asked, request, ask)
                turn = service.submit(asked, interval=interval, alone=alone, at_once=at_once)
                held.turns.append(turn)  # must hold those begun
        except BaseException:  # also when cancelled, and raised again
            held.leave()
            raise
        return held

    async def _wait_all(self, turns: list[Turn]) -> None:
        for turn in turns:
            await self._service.until_ended(turn)

    async def _stream(
        self,
        request: web.Request,
        turn: Turn,
        events: Callable[[Turn], Events],
        framing: Framing = PLAIN,
        long: Sequence[bytes] = (),
    ) -> web.StreamResponse:
        # The status is decided by the first thing there is to say.
        stream = Stream(request, turn, events(turn), framing, long=long)
        if not await stream.wait_begun():
            _raise_if_all_failed([turn])
        return await stream.run()

    async def _stream_answers(
        self,
        request: web.Request,
        voices: list[tuple[Turn, Events]],
        counted: Callable[[], dict[str, Any]] | None,
        long: Sequence[Sequence[bytes]] = (),
    ) -> web.StreamResponse:
        """Stream one answer, or several in one stream; for ``long`` see ``MergedStream``."""
        turns = [turn for turn, _ in voices]
        if len(voices) == 1:
            ((turn, events),) = voices
            told = _with_last_events(events, turns, counted)
            return await self._stream(request, turn, lambda _: told, long=long[0] if long else ())
        await _wait_any_begun(turns)
        _raise_if_all_failed(turns)
        last = partial(_last_events, turns, counted)
        return await MergedStream(request, voices, last, long).run()

    def _json(self, body: object) -> JsonReply:
        return JsonReply(_encode(body))

    async def _long_json(self, answer: dict[str, Any]) -> JsonReply:
        """An answer with its prompts' ids; long ones are written in slices."""
        pieces, written = list[bytes](), list[list[bytes]]()
        # Those of the whole answer, which vLLM's callers asked for, stand behind its choices.
        whole = [answer] if "prompt_token_ids" in answer else []
        for choice in (*answer["choices"], *whole):
            if len(choice["prompt_token_ids"]) > MOST_IDS:
                written.append(await encoded_ids(choice["prompt_token_ids"]))
                choice["prompt_token_ids"] = MARK
        if not written:
            return self._json(answer)
        first, *rest = _encode(answer).split(b"\0")  # which stands in no JSON
        for ids, behind in zip(written, rest, strict=True):
            pieces += [*ids, behind]
        return JsonReply(first, pieces)

    def _names(self, body: Mapping[str, Any]) -> TokenNames:
        by_id = bool(body.get("return_tokens_as_token_ids"))
        return TokenNames(self._tokenizer, by_id=by_id)

    def _sglang_events(self, turn: Turn) -> Events:
        return GenerateEvents(turn, self._tokenizer)

    def _sglang_indexed(self, turn: Turn, index: int) -> Events:
        """The events of one of several answers, each with its number, as SGLang has them."""
        over = False
        while not over:
            over = turn.is_over
            typed_abort(turn)
            yield {**parts.sglang(turn, self._tokenizer), "index": index}

    def _sglang_answer(self, turn: Turn) -> dict[str, Any]:
        typed_abort(turn)
        return parts.sglang(turn, self._tokenizer)


class HeldTurns:
    """Turns that a request listens to; it leaves them at the end of the ``with``.

    Args:
        service: runs them.
    """

    __slots__ = ("_service", "turns")

    def __init__(self, service: Service) -> None:
        self._service = service
        self.turns: list[Turn] = []

    def __enter__(self) -> list[Turn]:
        return self.turns

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Listen no longer."""
        for turn in self.turns:
            self._service.leave(turn)


def _needs_tokenizer(body: Mapping[str, Any]) -> bool:
    """Whether a body cannot be read without a tokenizer."""
    if body.get("input_ids") is not None:
        return False
    if body.get("messages") is not None or body.get("input") is not None:
        return True
    given = body.get("prompt", body.get("text"))
    first = given[0] if isinstance(given, list) and given else given
    return isinstance(first, str) or isinstance(body.get("tokens"), list)


def _takes_long(body: Mapping[str, Any]) -> bool:
    """Whether something in it is encoded, as texts are, or compiled, or there are many prompts.

    Each of these takes longer than its bytes: 64,000 prompts of one token take 0.1 s.
    """
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict) or _needs_tokenizer(body):
        return True
    ids = body.get("input_ids") or body.get("prompt")
    if isinstance(ids, list) and isinstance(ids[0], list):
        return True
    return any(one.get(name) for one in (body, sampling) for name in ("stop", "stop_regex"))


def _vllm_events(turn: Turn, index: int) -> Events:
    tokens, over = 0, False
    while not over:
        over = turn.is_over
        typed_abort(turn)
        choice = parts.vllm_choice(turn, index, tokens)
        tokens += len(choice["token_ids"])
        yield {"request_id": turn.request.rid, "choices": [choice]}


def _vllm_answer(turns: list[Turn]) -> dict[str, Any]:
    for turn in turns:
        typed_abort(turn)
    choices = [parts.vllm_choice(turn, index) for index, turn in enumerate(turns)]
    return {"request_id": turns[0].request.rid, "choices": choices, "prompt_logprobs": None}


def _traced(asked: TurnRequest, request: web.Request, ask: ParsedRequest) -> TurnRequest:
    """The same turn, as one of its caller's span."""
    operation = "text_completion" if ask.conversation is None else "chat"
    return asked.but(traceparent=request.headers.get("traceparent", ""), operation=operation)


def _job_of(request: web.Request) -> str | None:
    """Whose turns the caller's token says that these are; ``None`` = the caller may say it.

    A token for turns alone, an agent's, does not choose.
    """
    caller = caller_of(request)
    return caller.job or ("" if caller.limited else None)


async def _written_prompts(
    turns: Sequence[Turn],
) -> list[tuple[msgspec.Raw | None, Sequence[bytes]]]:
    """The ids of each turn's prompt in JSON, ``None`` for few; many are a mark, and pieces for it.

    Answers to one prompt share them.
    """
    written: dict[int, tuple[msgspec.Raw | None, Sequence[bytes]]] = {}
    for turn in turns:
        ids = turn.request.prompt
        if id(ids) in written:
            continue
        if len(ids) > MOST_IDS:
            written[id(ids)] = MARK, await encoded_ids(ids)
        else:
            many = len(ids) > _WRITTEN_AHEAD
            written[id(ids)] = msgspec.Raw(_encode(ids)) if many else None, ()
    return [written[id(turn.request.prompt)] for turn in turns]


async def _wait_begun(turn: Turn) -> None:
    """Wait until there is something to say."""
    while not turn.is_over and not turn.first_token_at:
        await turn.changed.wait()


async def _wait_any_begun(turns: list[Turn]) -> None:
    waiting = [asyncio.create_task(_wait_begun(turn)) for turn in turns]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


def _with_last_events(
    events: Events, turns: list[Turn], counted: Callable[[], dict[str, Any]] | None
) -> Events:
    yield from events
    yield from _last_events(turns, counted)


def _last_events(
    turns: list[Turn], counted: Callable[[], dict[str, Any]] | None
) -> Iterator[dict[str, Any]]:
    """What follows the answers: what they took, and why none of them is whole."""
    if counted is not None:
        yield counted()
    if (error := parts.stream_error(turns)) is not None:
        yield error


def _raise_if_all_failed(turns: list[Turn]) -> None:
    """Without a single answer the reply is an error.

    Raises:
        Exception: what the first turn failed with.
    """
    for turn in turns:
        if turn.state is not _FAILED:
            return
    raise turns[0].error or TurnLost("Internal", "the turn failed without saying why")


def _prompt_text(body: dict[str, Any]) -> str:
    text = body.get("prompt", body.get("text"))
    if not isinstance(text, str):
        message = "prompt: expected text (or messages)"
        raise BadRequest("InvalidTurn", message)
    return text
