"""A tree of turns gives back the very tokens, and training rows hold each sampled token once."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.rollouts.conversations import message_tree, saved_turns
from rose_core.rollouts.conversations.message_tree import (
    KnownDigests,
    MessageTree,
    Routing,
    TurnNode,
    digests_of,
    fingerprint,
    root_of,
)
from rose_core.rollouts.transcripts.spans import TokenSpan

Message = dict[str, Any]
ROOT = root_of([], {})
OWNER = ("job", "s")


def rows_of(tokens: int, recomputed: int = 0) -> Routing | None:
    return Routing.of(bytes(4 * (tokens - 1)), tokens, recomputed)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: tuple[str, object]) -> Message:
    made: Message = {"role": "assistant", "content": text}
    if calls:
        made["tool_calls"] = [
            {"id": str(n), "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls)
        ]
    return made


class Harness:
    """Sends conversations; ids are numbers that count up, so that every token is another one."""

    def __init__(self, tree: MessageTree) -> None:
        self.tree = tree
        self.next = 0

    def fresh(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))

    def turn(
        self, messages: list[Message], answer: Message, session: str = "s", root: bytes = ROOT
    ) -> TurnNode:
        match = self.tree.find("job", root, messages, session)
        prompt = (match.node.ids() if match.node else []) + self.fresh(3)
        sampled = self.fresh(2)
        return self.tree.note(
            ("job", session),
            f"r{self.next}",
            match,
            prompt,
            answer,
            sampled=sampled,
            logprobs=[-0.5] * 2,
            spans=(TokenSpan("run@1.0", 0, 2),),
        )


def test_a_linear_conversation_is_one_row_with_every_token_once() -> None:
    harness = Harness(MessageTree())
    talk = [user("go")]
    for number in range(20):
        answer = assistant(f"answer {number}")
        harness.turn(talk, answer)
        talk += [answer, user(f"result {number}")]
    (row,) = harness.tree.rows(OWNER)
    assert row.ids == list(range(100))
    assert list(row.mask) == [0, 0, 0, 1, 1] * 20
    assert [math.isnan(one) for one in row.logprobs] == [True, True, True, False, False] * 20
    assert [(span.start, span.end) for span in row.spans] == [
        (5 * n + 3, 5 * n + 5) for n in range(20)
    ]
    assert [(turn.start, turn.end) for turn in row.turns] == [
        (5 * n + 3, 5 * n + 5) for n in range(20)
    ]


def test_an_answers_beginning_alone_is_a_conversation_that_goes_on() -> None:
    """Nothing stands before the answer, which its caller has begun."""
    harness = Harness(MessageTree())
    first = harness.turn([], assistant("I shall look"))
    second = harness.turn([assistant("I shall look"), user("and?")], assistant("found"))
    assert second.parent is first
    (row,) = harness.tree.rows(OWNER)
    assert len(row.ids) == 10


def test_a_retry_is_a_branch_and_what_both_share_is_learnt_from_once() -> None:
    harness = Harness(MessageTree())
    talk = [user("go"), assistant("first"), user("result")]
    harness.turn(talk[:1], talk[1])
    harness.turn(talk, assistant("one way"))
    harness.turn(talk, assistant("another"))
    one, other = harness.tree.rows(OWNER)
    assert one.ids[:5] == other.ids[:5]
    assert (sum(one.mask), sum(other.mask)) == (4, 2)
    assert list(other.mask[:5]) == [0] * 5


def test_a_sub_agent_and_other_tools_begin_rows_of_their_own() -> None:
    harness = Harness(MessageTree())
    harness.turn([user("go")], assistant("x"))
    node = harness.turn(
        [user("go"), assistant("x"), user("y")], assistant("z"), root=root_of(["tool"], {})
    )
    assert node.altered_at is None, "nothing was altered: it is another conversation"
    assert [len(row.ids) for row in harness.tree.rows(OWNER)] == [5, 5]


@pytest.mark.parametrize(
    "sent",
    [
        assistant(" words \n", ("look", '{"b": 2, "a": 1}')),
        assistant("words", ("look", '{"a":1,"b":2}')),
        assistant("<think>hm</think>\nwords", ("look", {"a": 1, "b": 2})),
        assistant("hm</think>\nwords", ("look", {"a": 1.0, "b": 2})),
    ],
)
def test_what_harnesses_change_in_writing_is_the_same_message(sent: Message) -> None:
    assert fingerprint(sent) == fingerprint(assistant("words", ("look", {"a": 1, "b": 2})))


@pytest.mark.parametrize(
    "sent",
    [
        assistant("words"),
        assistant("other words", ("look", {"a": 1})),
        assistant("words", ("look", {"a": 2})),
        assistant("words", ("see", {"a": 1})),
        {"role": "user", "content": "words"},
    ],
)
def test_what_says_something_else_is_another_message(sent: Message) -> None:
    assert fingerprint(sent) != fingerprint(assistant("words", ("look", {"a": 1})))


def test_an_altered_history_is_located() -> None:
    harness = Harness(MessageTree())
    talk = [user("go"), assistant("first"), user("result"), assistant("second"), user("more")]
    harness.turn(talk[:1], talk[1])
    harness.turn(talk[:3], talk[3])
    whole = harness.tree.find("job", ROOT, talk, "s")
    assert (whole.messages, whole.altered_at, whole.lost_tokens) == (4, None, 0)
    changed = [*talk[:3], assistant("something else"), talk[4]]
    found = harness.tree.find("job", ROOT, changed, "s")
    assert (found.messages, found.altered_at, found.lost_tokens) == (2, 3, 2)
    early = [user("went"), *talk[1:]]
    found = harness.tree.find("job", ROOT, early, "s")
    assert (found.node, found.messages, found.altered_at) == (None, 0, 0)
    assert found.lost_tokens == 4, "of both turns"
    node = harness.turn(changed, assistant("third"))
    assert node.altered_at == 3


def test_what_a_sub_agent_has_sampled_is_not_lost_to_its_callers_altered_history() -> None:
    harness = Harness(MessageTree())
    talk = [user("go"), assistant("first"), user("result"), assistant("second")]
    harness.turn(talk[:1], talk[1])
    harness.turn(talk[:3], talk[3])
    harness.turn([user("sub")], assistant("found"), root=root_of(["tool"], {}))
    changed = [*talk[:3], assistant("something else"), user("more")]
    assert harness.tree.find("job", ROOT, changed, "s").lost_tokens == 2


def test_answers_before_a_sessions_first_turn_are_examples_and_nothing_is_altered() -> None:
    tree = MessageTree()
    examples = [user("2+2"), assistant("4"), user("3+3")]
    assert tree.find("job", ROOT, examples, "s").altered_at is None


def test_a_conversation_is_known_by_its_messages_and_only_to_its_own_job() -> None:
    harness = Harness(MessageTree())
    talk = [user("go"), assistant("first"), user("result")]
    harness.turn(talk[:1], talk[1])
    found = harness.tree.find("job", ROOT, talk)
    assert found.node is not None
    assert found.node.owner == OWNER
    assert harness.tree.find("other", ROOT, talk).node is None
    assert harness.tree.find("job", ROOT, talk, "another session").node is None


def test_a_turn_that_is_told_again_is_kept_once() -> None:
    tree = MessageTree()
    match = tree.find("job", ROOT, [user("go")], "s")
    for _ in range(2):
        tree.note(OWNER, "same", match, [1], assistant("x"), sampled=[2])
    assert len(tree) == 1


def test_the_least_recently_used_session_is_forgotten_whole() -> None:
    harness = Harness(MessageTree(most_tokens=22))
    for session in ("a", "b", "c", "d", "e"):
        harness.turn([user(session)], assistant(session), session=session)
    assert harness.tree.forgotten == 1
    assert not harness.tree.rows(("job", "a"))
    assert harness.tree.find("job", ROOT, [user("a"), assistant("a"), user("x")]).node is None
    assert len(harness.tree) == 4


def test_rows_are_those_of_the_moment_in_which_they_were_asked_for() -> None:
    """They are written while their caller reads, and the session goes on meanwhile."""
    harness = Harness(MessageTree(most_tokens=40))
    harness.turn([user("a")], assistant("a"), session="a")
    harness.turn([user("b")], assistant("b"), session="a")
    asked = harness.tree.rows(("job", "a"))
    before = [row.ids for row in asked]
    harness.turn([user("a"), assistant("a"), user("on")], assistant("c"), session="a")
    assert [row.ids for row in asked] == before
    for session in ("b", "c", "d", "e", "f"):
        harness.turn([user(session)], assistant(session), session=session)
    assert not harness.tree.rows(("job", "a")), "it was forgotten"
    assert [row.ids for row in asked] == before
    assert (len(asked), asked.most_tokens) == (2, max(map(len, before)))


def test_a_session_that_takes_too_much_is_forgotten_and_not_its_neighbours() -> None:
    harness = Harness(MessageTree(most_tokens=80))
    harness.turn([user("small")], assistant("small"), session="small")
    talk = [user("large")]
    for number in range(12):
        harness.turn(talk, assistant(str(number)), session="large")
        talk += [assistant(str(number)), user("on")]
    assert harness.tree.forgotten >= 1
    assert len(harness.tree.rows(("job", "small"))) == 1
    assert len(harness.tree) <= 5


def test_sessions_that_say_the_same_do_not_take_each_others_turns() -> None:
    """Rollouts of one task begin alike: the same prompt, often the same first answer."""
    harness = Harness(MessageTree())
    talk = [user("go"), assistant("ls"), user("result")]
    first = harness.turn(talk[:1], talk[1], session="a")
    other = harness.turn(talk[:1], talk[1], session="b")
    assert harness.tree.find("job", ROOT, talk, "a").node is first
    assert harness.tree.find("job", ROOT, talk, "b").node is other


def test_of_turns_that_said_the_same_the_one_counts_whose_id_a_call_names() -> None:
    harness = Harness(MessageTree())
    answer = assistant("", ("look", "{}"))
    first = harness.turn([user("go")], answer)
    harness.turn([user("go")], answer)
    answer["tool_calls"][0]["id"] = f"call_{first.rid}_0"
    assert harness.tree.find("job", ROOT, [user("go"), answer, user("so")]).node is first


def test_several_answers_to_one_request_share_what_they_were_given() -> None:
    tree = MessageTree()
    match = tree.find("job", ROOT, [user("go")], "s")
    nodes = [
        tree.note(OWNER, f"r{n}", match, [1, 2, 3], assistant(str(n)), sampled=[9])
        for n in range(4)
    ]
    assert all(node.given is nodes[0].given for node in nodes)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30))
def test_however_a_session_branches_every_token_is_in_its_rows_and_sampled_ones_once(
    choices: list[int],
) -> None:
    harness = Harness(MessageTree())
    talks: list[list[Message]] = [[user("go")]]
    sampled: set[int] = set()
    for number, choice in enumerate(choices):
        talk, answer = talks[choice % len(talks)], assistant(f"answer {number}")
        node = harness.turn(talk, answer)
        sampled |= set(node.sampled)
        talks.append([*talk, answer, user(f"result {number}")])
    rows = harness.tree.rows(OWNER)
    learnt = [token for row in rows for token, one in zip(row.ids, row.mask, strict=True) if one]
    assert sorted(learnt) == sorted(sampled)
    assert {token for row in rows for token in row.ids} == set(range(harness.next))
    for row in rows:
        assert row.ids == sorted(row.ids), "a row is one way through the tree"


words = st.text("ab", max_size=2)
talks = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "tool"]), words).map(
        lambda pair: {"role": pair[0], "content": pair[1]}
    ),
    max_size=6,
)


@given(st.lists(st.tuples(st.sampled_from([b"r", b"s"]), talks), max_size=12))
def test_known_digests_are_those_of_the_messages(
    asked: list[tuple[bytes, list[Message]]],
) -> None:
    known = KnownDigests(most=8)
    for root, talk in asked:
        for messages in (talk, [*talk, assistant("x"), user("y")]):
            assert known.of(root, messages) == digests_of(root, messages)


def test_of_a_conversation_that_goes_on_only_the_new_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[Message] = []

    def looking(message: Message) -> bytes:
        looked.append(message)
        return fingerprint(message)

    known, talk = KnownDigests(), [user("hi")]
    known.of(ROOT, talk)
    monkeypatch.setattr(message_tree, "fingerprint", looking)
    new = [assistant("words", ("f", {"a": 1})), user("more")]
    known.of(ROOT, [*talk, *new])
    assert looked == new
    altered = [user("HI"), *new, assistant("x"), user("y")]
    known.of(ROOT, altered)
    assert looked[2:] == altered, "what was altered is looked at from its beginning"


def test_a_conversation_that_was_saved_is_the_same_in_another_tree() -> None:
    tree, other = MessageTree(), MessageTree()
    root, talk, owner = root_of("tools"), [{"role": "user", "content": "go"}], ("job", "s")
    for number in range(3):
        match = tree.find("job", root, talk, "s")
        before = match.node.ids() if match.node is not None else []
        answer = {"role": "assistant", "content": f"said {number}"}
        tree.note(
            owner,
            f"rid{number}",
            match,
            [*before, 100 + number],
            answer,
            sampled=[number, number],
            logprobs=[-0.5, -0.25],
            spans=(TokenSpan("run@1.0", 0, 2),),
        )
        talk += [answer, {"role": "user", "content": "on"}]
    (row,) = tree.rows(owner)
    last = tree.last_before(owner, [*row.ids, 7])
    assert last is not None
    assert last.total == len(row.ids)
    assert tree.last_before(owner, row.ids[:-1]) is tree.turns(last)[1]
    assert tree.last_before(owner, [9, *row.ids]) is None
    turns, roots = saved_turns.of_bytes(saved_turns.to_bytes(tree.turns(last), tree.roots(owner)))
    other.adopt(owner, turns, roots, inherited=False)
    other.adopt(owner, turns, roots, inherited=False)  # twice is once
    (same,) = other.rows(owner)
    assert (same.ids, same.mask, list(same.logprobs)[1:3]) == (row.ids, row.mask, [-0.5, -0.25])
    assert same.spans == row.spans
    assert other.find("job", root, talk, "s").messages == 6
    other.adopt(("job", "child"), turns, roots, inherited=True)
    (inherited,) = other.rows(("job", "child"))
    assert not any(inherited.mask)
    assert len(other) == 6


def test_a_forks_inherited_turns_stay_so_when_it_comes_back_to_a_tree_that_knows_nothing() -> None:
    tree = MessageTree()
    harness = Harness(tree)
    talk = [user("go")]
    harness.turn(talk, assistant("one"))
    talk += [assistant("one"), user("on")]
    (parent,) = tree.rows(OWNER)
    child = "job", "child"

    def saved(session: tuple[str, str]) -> bytes:
        last = tree.last_before(session, next(iter(tree.rows(session))).ids)
        assert last is not None
        return saved_turns.to_bytes(tree.turns(last), tree.roots(session))

    def restored(data: bytes, session: tuple[str, str]) -> list[int]:
        other = MessageTree()
        turns, roots = saved_turns.of_bytes(data)
        # Saved once more, as where a router gives it to its replicas.
        turns, roots = saved_turns.of_bytes(saved_turns.to_bytes(turns, roots))
        other.adopt(session, turns, roots, inherited=False)
        return list(next(iter(other.rows(session))).mask)

    of_parent = saved(OWNER)
    assert restored(of_parent, OWNER) == list(parent.mask) == [0, 0, 0, 1, 1]
    assert restored(of_parent, child) == [0] * 5, "the record that it was forked from"
    turns, roots = saved_turns.of_bytes(of_parent)
    tree.adopt(child, turns, roots, inherited=True)
    assert restored(saved(child), child) == [0] * 5
    harness.turn(talk, assistant("two"), "child")
    assert restored(saved(child), child) == [0] * 5 + [0, 0, 0, 1, 1]


def test_rows_that_cover_earlier_turns_count_their_tokens_as_recomputed() -> None:
    tree = MessageTree()
    talk = [user("go")]
    # Turns are of three tokens, two of them sampled.
    for number, routing in enumerate((None, rows_of(6, 1), rows_of(9), None, rows_of(15))):
        match = tree.find("job", ROOT, talk, "s")
        prompt = [*(match.node.ids() if match.node is not None else []), 7]
        node = tree.note(
            OWNER,
            f"r{number}",
            match,
            prompt,
            assistant(f"{number}"),
            sampled=[1, 2],
            routing=routing,
        )
        talk += [assistant(f"{number}"), user("on")]
    kept = [one.routing for one in tree.turns(node)]
    counted = [None if one is None else (one.begins, one.ends, one.recomputed) for one in kept]
    assert counted == [None, (0, 5, 1 + 2), (5, 8, 0), None, (0, 14, 8)]
    (row,) = tree.rows(OWNER)
    assert row.routing is not None
    assert row.routing.recomputed == 8, "what an earlier turn knew is not what stands here"


@pytest.mark.parametrize("routing", [(b"abcd", 0, 0, 0), (b"abc", 0, 2, 0), (b"ab", -1, 2, 0)])
def test_saved_rows_of_experts_that_are_none_are_refused(routing: object) -> None:
    turn = ["r", b"", b"", b"", [], "stop", "", b"d", [], None, routing]
    with pytest.raises(saved_turns.NotReadable, match="rows of"):
        saved_turns.of_bytes(msgspec.msgpack.encode([1, [], [turn]]))


def test_a_conversation_of_more_turns_than_a_router_keeps_is_neither_exported_nor_read() -> None:
    digest = bytes(16)
    turn = ["r", b"abcd", b"", b"", [], "stop", "", digest, [digest], None]
    most = saved_turns.MOST_TURNS
    turns, roots = saved_turns.of_bytes(msgspec.msgpack.encode([1, [], [turn] * most]))
    assert len(turns) == most
    assert saved_turns.to_bytes(turns, roots)
    assert saved_turns.to_bytes([*turns, turns[-1]], roots) == b""
    with pytest.raises(saved_turns.NotReadable, match=str(most)):
        saved_turns.of_bytes(msgspec.msgpack.encode([1, [], [turn] * (most + 1)]))
    with pytest.raises(saved_turns.NotReadable, match="bytes, over"):
        saved_turns.of_bytes(bytes(saved_turns.MOST_BYTES + 1))


def test_bytes_that_are_no_conversation_are_refused() -> None:
    for wrong in (b"", b"hi", msgspec.msgpack.encode([9, [], []])):
        with pytest.raises(saved_turns.NotReadable):
            saved_turns.of_bytes(wrong)
    torn = [1, [], [["r", b"abc", b"", b"", [], "stop", "", b"d", [], None]]]
    with pytest.raises(saved_turns.NotReadable, match="torn"):
        saved_turns.of_bytes(msgspec.msgpack.encode(torn))
