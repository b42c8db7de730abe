r"""Which tokens stand behind a harness's messages: a tree of turns, exact to the token.

A harness sends the whole conversation again with every request, as messages. Rendered and tokenized
again, what the model wrote comes back as other tokens than it sampled, and a trainer would learn
from what never happened. So each turn is kept under the messages that led to it and its answer. A
later request that begins with these messages gets the very tokens; only what is new is rendered.

    root (tools, template's variables) -> turn -> turn -> turn
                                             \-> turn             (a retry, another branch)
    root of a sub-agent                -> turn

Messages are compared by what they say (``fingerprint``): harnesses trim words, write arguments of
calls with other spaces and leave out what a model thought. Two turns may have said the same; then
the one counts whose id stands in a call's, else the last.

Next step: ``rose_router.http.conversations.history`` asks ``find`` before a turn and calls ``note``
after it; ``rows`` is what a trainer learns from.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import msgspec

from rose_core.rollouts.transcripts.spans import TokenSpan, shifted

Digest = bytes
Owner = tuple[str, str]
"""Job and session: jobs do not see each other's."""

MOST_TOKENS = 1 << 23
"""Tokens kept, of all sessions: with their log-probs 64 MiB."""
MOST_TURNS = 1 << 15
"""Turns kept, of all sessions: a turn's own objects take about 2 KiB."""

MOST_DIGESTS = 1 << 17
"""Digests of conversations kept beside the turns."""
_LINES = msgspec.json.Encoder().encode_lines

_PART = 4
"""One session may have a quarter of all: then it is forgotten, and not its neighbours."""

# The template may have opened the thought.
_THOUGHT = re.compile(r"\A\s*(?:<think>)?.*?</think>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts tokens went through (routing replay), a row for each token but the last one.

    A token's row is known once it has been an engine's input: the last one's comes with the next
    turn.

    Attributes:
        rows: as the engine gave them, one after the other.
        begins: the token of the first row, in the conversation.
        width: bytes of a row.
        recomputed: rows of sampled tokens that another engine than theirs computed, as prompt,
            after the turn had moved.
    """

    rows: bytes
    begins: int
    width: int
    recomputed: int = 0

    @classmethod
    def of(cls, rows: bytes, tokens: int, recomputed: int = 0) -> Routing | None:
        """Of a conversation of so many tokens; ``None`` where the rows do not fit to them."""
        if tokens < 2 or not rows or len(rows) % (tokens - 1):
            return None
        return cls(rows, 0, len(rows) // (tokens - 1), recomputed)

    @property
    def ends(self) -> int:
        """The token after that of the last row."""
        return self.begins + len(self.rows) // self.width

    def since(self, token: int) -> Routing:
        """The same from a token on."""
        left = self.rows[(token - self.begins) * self.width :]
        return Routing(left, token, self.width, self.recomputed)

    def until(self, token: int) -> Routing:
        """The same up to a token."""
        kept = self.rows[: (token - self.begins) * self.width]
        return Routing(kept, self.begins, self.width, self.recomputed)

    def then(self, after: Routing) -> Routing | None:
        """Both, one behind the other; ``None`` where there is a gap, or rows are of other kinds."""
        if after.width != self.width or not self.begins <= after.begins <= self.ends:
            return None
        kept = self.rows[: (after.begins - self.begins) * self.width]
        recomputed = self.recomputed + after.recomputed
        return Routing(kept + after.rows, self.begins, self.width, recomputed)


@dataclass(eq=False, slots=True)
class TurnNode:
    """A turn that was sampled here.

    Attributes:
        owner: whose it is.
        rid: of the turn.
        parent: the turn before it in the conversation; ``None`` at the conversation's first.
        given: ids between the parent's last token and the first one sampled: messages, rendered.
        sampled: the engine's ids.
        logprobs: of those; empty where none were asked for.
        spans: which version sampled which of them.
        finish: why it ended.
        semantics: which distribution the log-probs belong to.
        digest: of all messages up to and with the answer.
        path: digests of the messages since the parent, the answer's last.
        altered_at: index of the request's first message that is not what this session has seen
            although the model has answered after it; ``None`` = nothing was altered.
        total: ids from the conversation's beginning to the turn's end.
        routing: experts of its own ids and of its parent's last one; ``None`` = not known.
        inherited: it was sampled under another session, which this one is a fork of; its tokens
            are learnt there.
    """

    owner: Owner
    rid: str
    parent: TurnNode | None
    given: array[int]
    sampled: array[int]
    logprobs: array[float]
    spans: tuple[TokenSpan, ...]
    finish: str
    semantics: str
    digest: Digest
    path: tuple[Digest, ...]
    altered_at: int | None
    total: int
    children: int = 0
    inherited: bool = False
    routing: Routing | None = None

    def ids(self) -> list[int]:
        """All ids from the conversation's beginning to the turn's end."""
        found: list[int] = []
        for node in reversed(list(_upwards(self))):
            found.extend(node.given)
            found.extend(node.sampled)
        return found


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What of a request's messages is known.

    Attributes:
        node: the last turn that the messages contain as it was sampled; ``None`` = none.
        messages: how many of them that covers.
        digests: of the messages up to each one, for ``note``.
        root: of the conversation.
        altered_at: see ``TurnNode``.
        lost_tokens: of an altered history: tokens sampled in the session's last conversation that
            the node's has not, and that are rendered anew, if anything is said of them at all.
    """

    node: TurnNode | None
    messages: int
    digests: tuple[Digest, ...]
    root: bytes = b""
    altered_at: int | None = None
    lost_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TurnRange:
    """Where a turn's sampled tokens stand in a row."""

    rid: str
    start: int
    end: int
    finish: str
    semantics: str
    altered_at: int | None


@dataclass(frozen=True)
class TrainingRow:
    """A conversation from its first token to a last turn, with what a trainer needs of each token.

    Attributes:
        ids: all tokens.
        mask: 1 where the token was sampled and no earlier row of the session has it too.
        logprobs: of sampled tokens; NaN elsewhere.
        spans: which version sampled which tokens, in places of the row.
        turns: in order.
        routing: experts of all tokens but the last; ``None`` = not of all of them.
    """

    ids: list[int]
    mask: bytearray
    logprobs: array[float]
    spans: tuple[TokenSpan, ...]
    turns: tuple[TurnRange, ...]
    routing: Routing | None = None


@dataclass(frozen=True, slots=True)
class SessionRows(Iterable[TrainingRow]):
    """The rows of a session as it was, each put together when it is its turn.

    Attributes:
        last: the conversations' last turns, in the order in which those ended.
    """

    last: tuple[TurnNode, ...] = ()

    def __len__(self) -> int:
        return len(self.last)

    def __iter__(self) -> Iterator[TrainingRow]:
        seen: set[int] = set()
        return (_row(node, seen) for node in self.last)

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest row, which is how much one of them takes at most."""
        return max((node.total for node in self.last), default=0)

    @property
    def most_routed(self) -> int:
        """Bytes of experts of the row that has most of them, at most."""
        return max((_routed(node) for node in self.last), default=0)


@dataclass(frozen=True, slots=True)
class KeptSession:
    """What is told of a session beside its rows.

    Attributes:
        key: its caller's name for it, or its first turn's id.
        by: what said so in its first turn; empty = it began as another's: it is a fork.
        first: id of its first turn.
        turns: that are kept.
    """

    key: str
    by: str
    first: str
    turns: int


@dataclass(slots=True)
class _Session:
    """Turns of a session, in the order in which they ended.

    Attributes:
        known: the same by id and what was said.
        seen: digests of all messages.
        roots: what stands before its conversations.
        by: see ``KeptSession``.
    """

    nodes: list[TurnNode] = field(default_factory=list)
    known: dict[tuple[str, Digest], TurnNode] = field(default_factory=dict)
    seen: set[Digest] = field(default_factory=set)
    roots: set[bytes] = field(default_factory=set)
    tokens: int = 0
    by: str = ""


class MessageTree:
    """The turns of the most recently used sessions.

    Args:
        most_tokens: of all sessions.
        most_turns: of all sessions.

    Attributes:
        forgotten: sessions given up for room: their turns are rendered again.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS, most_turns: int = MOST_TURNS) -> None:
        self._most_tokens, self._most_turns = most_tokens, most_turns
        self._sessions: OrderedDict[Owner, _Session] = OrderedDict()
        # Of a job: all turns that end with these words.
        self._nodes: dict[tuple[str, Digest], list[TurnNode]] = {}
        self._given: tuple[PrefixMatch | None, array[int]] = (None, array("I"))
        self._tokens = self._turns = 0
        self.forgotten = 0

    def __len__(self) -> int:
        return self._turns

    def find(
        self,
        job: str,
        root: bytes,
        messages: Sequence[Mapping[str, Any]],
        session: str = "",
        digests: Sequence[Digest] = (),
    ) -> PrefixMatch:
        """The longest beginning of the messages that ends with an answer sampled here.

        Args:
            job: whose request it is.
            root: what stands before the messages in every prompt: tools, template's variables.
            messages: the conversation.
            session: of the request; empty = not known, and then altered histories are not seen.
            digests: of the messages (``digests_of``), where the caller has them.
        """
        digests = tuple(digests) or digests_of(root, messages)
        answers = [n for n, one in enumerate(messages) if one.get("role") == "assistant"]
        for index in reversed(answers):
            node = self._find_turn(job, digests[index], session, messages[index])
            if node is not None:
                self._sessions.move_to_end(node.owner)
                altered = self._altered(node.owner, root, digests, answers, index + 1)
                lost = 0 if altered is None else self._lost(node.owner, node)
                return PrefixMatch(node, index + 1, digests, root, altered, lost)
        altered = self._altered((job, session), root, digests, answers, 0) if session else None
        lost = 0 if altered is None else self._lost((job, session), None)
        return PrefixMatch(None, 0, digests, root, altered, lost)

    def _lost(self, owner: Owner, known: TurnNode | None) -> int:
        """Tokens that a conversation's last turn and those before it have sampled beyond a turn.

        Of the session's conversations it is that of the turn, or the last one.
        """
        kept = {id(node) for node in _upwards(known)}
        for node in reversed(self._sessions[owner].nodes):
            path = list(_upwards(node))
            if known is None or id(path[-1]) in kept:
                return sum(len(one.sampled) for one in path if id(one) not in kept)
        return 0

    def _find_turn(
        self, job: str, digest: Digest, session: str, answer: Mapping[str, Any]
    ) -> TurnNode | None:
        """The turn that said so; of several the one that the answer's calls name."""
        found = [
            node for node in self._nodes.get((job, digest), ()) if session in {"", node.owner[1]}
        ]
        if len(found) > 1:
            ids = " ".join(_call_ids(answer))
            found = [node for node in found if node.rid in ids] or found
        return found[-1] if found else None

    def _altered(
        self,
        owner: Owner,
        root: bytes,
        digests: Sequence[Digest],
        answers: Sequence[int],
        known: int,
    ) -> int | None:
        """Where a history departs from its session; answers before the first turn are examples."""
        session = self._sessions.get(owner)
        if session is None or root not in session.roots or not answers or answers[-1] < known:
            return None
        return next((n for n in range(known, len(digests)) if digests[n] not in session.seen), None)

    def note(
        self,
        owner: Owner,
        rid: str,
        match: PrefixMatch,
        prompt: Sequence[int],
        answer: Mapping[str, Any],
        *,
        sampled: Sequence[int],
        logprobs: Sequence[float] = (),
        spans: tuple[TokenSpan, ...] = (),
        finish: str = "stop",
        semantics: str = "",
        routing: Routing | None = None,
        by: str = "",
    ) -> TurnNode:
        """A turn has ended.

        Args:
            owner: whose it is.
            rid: its id.
            match: what ``find`` said of its request.
            prompt: its ids; they begin with those of the match's node.
            answer: the assistant's message as the harness was shown it.
            sampled: its output ids.
            logprobs: one for each of them, or none.
            spans: over them.
            finish: why it ended.
            semantics: of the log-probs.
            routing: experts of the conversation from its first token on.
            by: what said whose it is.
        """
        parent = match.node
        before = parent.total if parent is not None else 0
        # A conversation may be an answer's beginning alone: nothing then stands before it.
        said = match.digests[-1] if match.digests else _linked(b"", match.root)
        digest = _linked(said, fingerprint(answer))
        session = self._sessions.setdefault(owner, _Session(by=by))
        self._sessions.move_to_end(owner)
        if (found := session.known.get((rid, digest))) is not None:
            return found  # its caller asked for the same turn again
        given = self._given[1] if self._given[0] is match else array("I", prompt[before:])
        shared = self._given[0] is match  # several answers to one request
        self._given = match, given
        node = TurnNode(
            owner,
            rid,
            parent,
            given,
            array("I", sampled),
            array("f", logprobs),
            spans,
            finish,
            semantics,
            digest,
            (*match.digests[match.messages :], digest),
            match.altered_at,
            len(prompt) + len(sampled),
            routing=_own(routing, parent),
        )
        if parent is not None:
            parent.children += 1
        session.nodes.append(node)
        session.known[rid, digest] = node
        session.seen.update(node.path)
        session.roots.add(match.root)
        self._nodes.setdefault((owner[0], digest), []).append(node)
        size = len(sampled) + (0 if shared else len(given)) + _tokens_of(node.routing)
        session.tokens += size
        self._tokens += size
        self._turns += 1
        self._make_room(owner)
        return node

    def rows(self, owner: Owner) -> SessionRows:
        """A row for each last turn of the session, in the order in which those ended."""
        session = self._sessions.get(owner)
        nodes = session.nodes if session is not None else ()
        return SessionRows(tuple(node for node in nodes if not node.children))

    def sessions(self, job: str, most: int) -> tuple[list[KeptSession], int]:
        """A job's sessions, the last used first, and how many more than ``most`` it has."""
        mine = [(key, one) for (of, key), one in self._sessions.items() if of == job and one.nodes]
        told = [
            KeptSession(key, one.by, one.nodes[0].rid, len(one.nodes))
            for key, one in mine[: -most - 1 : -1]
        ]
        return told, len(mine) - len(told)

    def last_before(self, owner: Owner, ids: Sequence[int]) -> TurnNode | None:
        """The last turn of a session whose ids, to its end, are a beginning of those given."""
        session = self._sessions.get(owner)
        best: TurnNode | None = None
        for node in reversed(session.nodes if session is not None else ()):
            longer = best is None or node.total > best.total
            if longer and node.total <= len(ids) and node.ids() == list(ids[: node.total]):
                best = node
        return best

    def turns(self, last: TurnNode) -> list[TurnNode]:
        """A conversation's turns, from its first one to the one given."""
        return list(_upwards(last))[::-1]

    def roots(self, owner: Owner) -> frozenset[bytes]:
        """What stands before a session's conversations."""
        session = self._sessions.get(owner)
        return frozenset(session.roots) if session is not None else frozenset()

    def adopt(
        self, owner: Owner, turns: Sequence[TurnNode], roots: Iterable[bytes], *, inherited: bool
    ) -> None:
        """Give a session a conversation's turns: a fork's, or one that comes back.

        Args:
            owner: the session.
            turns: in order; what the session has of them is kept.
            roots: of the conversation.
            inherited: their tokens are learnt in another session; so are those of turns that were
                inherited already, and of turns that another session has saved.
        """
        if not turns:
            return
        session = self._sessions.setdefault(owner, _Session())
        self._sessions.move_to_end(owner)
        session.roots.update(roots)
        parent: TurnNode | None = None
        for turn in turns:
            known = session.known.get((turn.rid, turn.digest))
            if known is None:
                taken = inherited or turn.inherited or turn.owner[1] not in {"", owner[1]}
                known = self._copied(owner, session, turn, parent, inherited=taken)
            parent = known
        self._make_room(owner)

    def _copied(
        self,
        owner: Owner,
        session: _Session,
        turn: TurnNode,
        parent: TurnNode | None,
        *,
        inherited: bool,
    ) -> TurnNode:
        node = replace(turn, owner=owner, parent=parent, children=0, inherited=inherited)
        if parent is not None:
            parent.children += 1
        session.nodes.append(node)
        session.known[node.rid, node.digest] = node
        session.seen.update(node.path)
        self._nodes.setdefault((owner[0], node.digest), []).append(node)
        size = len(node.sampled) + len(node.given) + _tokens_of(node.routing)
        session.tokens += size
        self._tokens += size
        self._turns += 1
        return node

    def _make_room(self, owner: Owner) -> None:
        mine = self._sessions[owner]
        if mine.tokens * _PART > self._most_tokens or len(mine.nodes) * _PART > self._most_turns:
            self._forget(owner)
        while self._tokens > self._most_tokens or self._turns > self._most_turns:
            self._forget(next(iter(self._sessions)))

    def _forget(self, owner: Owner) -> None:
        session = self._sessions.pop(owner)
        for node in session.nodes:
            key = node.owner[0], node.digest
            self._nodes[key].remove(node)
            if not self._nodes[key]:
                del self._nodes[key]
        self._tokens -= session.tokens
        self._turns -= len(session.nodes)
        self.forgotten += 1


class KnownDigests:
    """Digests of conversations seen before, so that a turn looks at its own messages only.

    A request holds all messages of the one before it, then the answer to that one, then what is
    new. Whether it does is told by one hash over how they are written.

    Args:
        most: digests kept, of all conversations; each takes about 64 bytes.
    """

    def __init__(self, most: int = MOST_DIGESTS) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, tuple[Digest, ...]] = OrderedDict()
        self._count = 0
        self._lock = Lock()  # long conversations are read in threads

    def of(self, root: bytes, messages: Sequence[Mapping[str, Any]]) -> tuple[Digest, ...]:
        """What the conversation has said up to each message."""
        answers = (n for n, one in enumerate(messages) if one.get("role") == "assistant")
        asked = max(answers, default=0)
        written = hashlib.blake2b(root, digest_size=16)
        written.update(_LINES(messages[:asked]))
        known = self._take(written.digest()) if asked else ()
        digests = (*known, *_chain(root, messages[len(known) :], known[-1:]))
        written.update(_LINES(messages[asked:]))
        self._keep(written.digest(), digests)
        return digests

    def _take(self, key: bytes) -> tuple[Digest, ...]:
        with self._lock:
            found = self._kept.pop(key, ())
            self._count -= len(found)
        return found

    def _keep(self, key: bytes, digests: tuple[Digest, ...]) -> None:
        with self._lock:
            self._count += len(digests) - len(self._kept.pop(key, ()))
            self._kept[key] = digests
            while self._count > self._most:
                self._count -= len(self._kept.popitem(last=False)[1])


def fingerprint(message: Mapping[str, Any]) -> bytes:
    """What a message says, however a harness writes it.

    Args:
        message: in OpenAI's words, its content as text.
    """
    role, content = str(message.get("role")), str(message.get("content") or "")
    if role == "assistant":
        content = _THOUGHT.sub("", content)
    calls = [_call(one) for one in message.get("tool_calls") or ()]
    parts = [role, content.strip(), calls]
    return json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()


def _call(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = arguments.strip()
    return [function.get("name"), _whole(arguments or {})]


def _whole(value: object) -> object:
    """The same with 5.0 as 5: JavaScript's harnesses know no other number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _whole(one) for name, one in value.items()}
    return [_whole(one) for one in value] if isinstance(value, list) else value


def _call_ids(answer: Mapping[str, Any]) -> Iterator[str]:
    for call in answer.get("tool_calls") or ():
        if isinstance(call, Mapping):
            yield str(call.get("id", ""))


def root_of(*parts: object) -> bytes:
    """What prompts of one conversation have in common beside its messages."""
    return json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str).encode()


def digests_of(root: bytes, messages: Sequence[Mapping[str, Any]]) -> tuple[Digest, ...]:
    """What the conversation has said up to each message."""
    return tuple(_chain(root, messages))


def _chain(
    root: bytes, messages: Sequence[Mapping[str, Any]], after: Sequence[Digest] = ()
) -> Iterator[Digest]:
    digest = after[-1] if after else _linked(b"", root)
    for message in messages:
        digest = _linked(digest, fingerprint(message))
        yield digest


def _linked(before: Digest, content: bytes) -> Digest:
    return hashlib.blake2b(before + content, digest_size=16).digest()


def _upwards(node: TurnNode | None) -> Iterator[TurnNode]:
    while node is not None:
        yield node
        node = node.parent


def _own(routing: Routing | None, parent: TurnNode | None) -> Routing | None:
    """What of a conversation's rows is not its parent's."""
    before = parent.routing if parent is not None else None
    if routing is None or parent is None:
        return routing
    if before is None or before.width != routing.width:
        # What is before it was computed as prompt, and these rows stand for all of it.
        earlier = sum(len(node.sampled) for node in _upwards(parent))
        return replace(routing, recomputed=routing.recomputed + earlier)
    return routing.since(before.ends)


def _tokens_of(routing: Routing | None) -> int:
    """As many tokens as take the room of the rows: an id and its log-prob are eight bytes."""
    return 0 if routing is None else len(routing.rows) // 8


def _row(last: TurnNode, seen: set[int]) -> TrainingRow:
    """The row that ends with a turn.

    Args:
        last: the turn.
        seen: turns whose tokens stand in an earlier row; those of this one are added.
    """
    ids: list[int] = []
    mask, logprobs = bytearray(), array("f")
    spans: list[TokenSpan] = []
    turns: list[TurnRange] = []
    routing: Routing | None = None
    for node in reversed(list(_upwards(last))):
        routing = _joined(routing, node.routing)
        given, made = len(node.given), len(node.sampled)
        start = len(ids) + given
        ids.extend(node.given)
        ids.extend(node.sampled)
        fresh = id(node) not in seen and not node.inherited
        seen.add(id(node))
        mask.extend(bytes(given) + bytes([fresh]) * made)
        logprobs.extend([math.nan] * given)
        logprobs.extend(node.logprobs if len(node.logprobs) == made else [math.nan] * made)
        spans += shifted(node.spans, start)
        turns.append(
            TurnRange(node.rid, start, start + made, node.finish, node.semantics, node.altered_at)
        )
    known = routing is not None and routing.begins == 0 and routing.ends == len(ids) - 1
    return TrainingRow(ids, mask, logprobs, tuple(spans), tuple(turns), routing if known else None)


def _routed(last: TurnNode) -> int:
    known = (node.routing for node in _upwards(last))
    return sum(len(one.rows) for one in known if one is not None)


def _joined(before: Routing | None, after: Routing | None) -> Routing | None:
    if before is None or after is None or after.begins == 0:
        return after if after is not None else before
    return before.then(after)
