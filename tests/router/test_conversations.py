"""A conversation makes the prompt that SGLang would have made of it, or a refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rose_core.rollouts.errors import InvalidTurn
from rose_router.errors import BadRequest
from rose_router.http.conversations.conversation import begun, messages_of
from rose_router.http.dialects import chat
from rose_router.http.tokenizer.tokenization import Tokenizer

CALL = {"name": "look", "arguments": '{"at": [1, 2]}'}
# The part of Qwen 2.5's own template that writes calls of tools.
QWEN = (
    "{%- for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{%- endfor %}{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def speaker(folder: Path, template: str) -> Tokenizer:
    """A tokenizer of one token per byte, with this chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Tokenizer(folder)


def prompt(folder: Path, template: str = QWEN, **body: Any) -> str:  # noqa: ANN401  # of a request
    made = speaker(folder, template)
    return made.decode(chat.prompt_of(body, {}, made))


def test_arguments_of_calls_reach_the_template_as_an_object(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]}
    reported = prompt(tmp_path, messages=[{"role": "user", "content": "hi"}, called])
    assert reported == '<user>hi<assistant>{"name": "look", "arguments": {"at": [1, 2]}}<assistant>'


@pytest.mark.parametrize("written", ["{not json", "[1]", "7"])
def test_arguments_that_are_no_object_stay_as_the_model_wrote_them(written: str) -> None:
    calls = [{"function": {"name": "look", "arguments": written}}]
    (made,) = messages_of([{"role": "assistant", "tool_calls": calls}])
    assert made["tool_calls"][0]["function"]["arguments"] == written


def test_a_call_without_arguments_has_none(tmp_path: Path) -> None:
    calls = [{"function": {"name": "look", "arguments": ""}}]
    (made,) = messages_of([{"role": "assistant", "tool_calls": calls}])
    assert made["tool_calls"][0]["function"]["arguments"] == {}


def test_parts_of_text_are_one_text_and_what_the_caller_sent_is_not_changed() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    given = [{"role": "user", "content": parts, "name": "kim"}]
    assert messages_of(given) == [{"role": "user", "content": "one two", "name": "kim"}]
    assert given[0]["content"] is parts


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages\\[0\\]"),
        ([{"content": "hi"}], "messages\\[0\\]"),
        ([{"role": "user", "content": 7}], "messages\\[0\\].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "content\\[0\\]: 'image_url'"),
        ([{"role": "user", "content": ["hi"]}], "content\\[0\\]"),
        ([{"role": "assistant", "tool_calls": 7}], "tool_calls"),
    ],
)
def test_what_is_no_conversation_of_texts_is_refused_by_name(messages: object, field: str) -> None:
    with pytest.raises(InvalidTurn, match=field):
        messages_of(messages)


def test_an_answer_that_was_begun_is_continued(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    assert prompt(tmp_path, messages=talk, continue_final_message=True) == (
        "<user>hi<assistant>Well"
    )
    with pytest.raises(InvalidTurn, match="continue_final_message"):
        begun(messages_of(talk[:1]), goes_on=True)


def test_the_generation_prompt_may_be_left_out(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}]
    assert prompt(tmp_path, messages=talk, add_generation_prompt=False) == "<user>hi"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{{ messages[0] | tojson(sort_keys=true, separators=(',', ':')) }}",
         '{"content":"hi","role":"user"}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ reasoning_effort }}", "low"),
    ],
)  # fmt: skip
def test_templates_find_what_transformers_gives_them(
    tmp_path: Path, template: str, text: str
) -> None:
    talk = [{"role": "user", "content": "hi"}]
    assert prompt(tmp_path, template, messages=talk, reasoning_effort="low") == text


def test_a_broken_template_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="broken"):
        prompt(tmp_path, "{% if %}", messages=[{"role": "user", "content": "hi"}])


def test_a_template_computes_a_text_and_nothing_else(tmp_path: Path) -> None:
    spy = "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}"
    with pytest.raises(BadRequest, match="refuses"):
        prompt(tmp_path, spy, messages=[{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_call_of_no_tool_cannot_be_forced(tmp_path: Path, choice: object) -> None:
    made = speaker(tmp_path, QWEN)
    body = {"messages": [{"role": "user", "content": "hi"}], "tool_choice": choice}
    with pytest.raises(InvalidTurn, match="tool_choice"):
        chat.read(body, {}, made, lambda: "r")


# The results of calls begin with a word that no other message has, as in DeepSeek's template.
BY_CALLS = (
    "{% set ns = namespace(called=false) %}{% for m in messages %}"
    "{% if m.role == 'tool' and ns.called %}<results>{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% set ns.called = m.tool_calls is defined %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


# After an answer each of these says something else by what stands far before it.
BY_NUMBER = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<{{ messages | length }}>{% endif %}"
)
BY_A_LONG_TALK = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt and messages | length > 60 %}<long>{% endif %}"
)
# As Qwen 3's: thoughts are shown since the last question only.
BY_LAST_QUESTION = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if loop.index0 > ns.last and m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{{ m.content }}<end>{% endfor %}<assistant>"
)


def rounds(count: int, text: str = "user") -> list[dict[str, Any]]:
    """A first question and so many answers, each with what is told of it."""
    talk: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    for n in range(count):
        talk.append({"role": "assistant", "content": f"words {n}", "reasoning_content": f"t{n}"})
        if text == "tool":
            talk[-1]["tool_calls"] = [{"id": f"c{n}", "type": "function", "function": CALL}]
        talk.append({"role": text, "content": f"more {n}", "tool_call_id": f"c{n}"})
    return talk


@pytest.mark.parametrize("template", [QWEN, BY_CALLS, BY_NUMBER, BY_LAST_QUESTION])
@pytest.mark.parametrize("text", ["user", "tool"])
def test_what_follows_an_answer_is_what_the_whole_conversation_says(
    tmp_path: Path, template: str, text: str
) -> None:
    made = speaker(tmp_path, template)
    for count in range(1, 40):
        talk = rounds(count, text)
        after = made.chat_after(talk, len(talk) - 2, [], {})
        if after is not None:  # else the whole is rendered
            whole = made.decode(made.chat(talk, [], {}))
            assert whole.endswith(f"words {count - 1}" + made.decode(after)) or text == "tool"
            assert whole.endswith(made.decode(after))


def test_a_template_that_looks_far_back_is_found_out_when_a_conversation_has_doubled(
    tmp_path: Path,
) -> None:
    made = speaker(tmp_path, BY_A_LONG_TALK)
    for count in (20, 32, 33, 50):
        talk = rounds(count, "tool")
        after = made.chat_after(talk, len(talk) - 2, [], {})
        assert after is not None
        assert ("<long>" in made.decode(after)) == (count > 30), count


# Whatever a person says so holds from there on, as Qwen 3's switches do.
BY_A_SWITCH = (
    "{% set ns = namespace(quiet=false) %}{% for m in messages %}"
    "{% if m.role == 'user' and '/no_think' in m.content %}{% set ns.quiet = true %}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>{% if ns.quiet %}<no-thought>{% endif %}"
)


@pytest.mark.parametrize("text", ["user", "tool"])
def test_a_persons_word_from_the_middle_of_a_conversation_holds_at_each_later_turn(
    tmp_path: Path, text: str
) -> None:
    made = speaker(tmp_path, BY_A_SWITCH)
    for count in range(12, 40):
        talk = rounds(count, text)
        talk.insert(21, {"role": "user", "content": "shorter /no_think"})
        after = made.chat_after(talk, len(talk) - 2, [], {})
        assert after is not None
        assert made.decode(after).endswith("<assistant><no-thought>"), count


def test_what_follows_an_answer_with_calls_is_taken_only_where_the_template_goes_on_alike(
    tmp_path: Path,
) -> None:
    made = speaker(tmp_path, BY_CALLS)
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "words"},
        {"role": "user", "content": "so"},
    ]
    after = made.chat_after(talk, 1, [], {})
    assert after is not None
    assert made.decode(after) == "<user>so<assistant>"
    talk[1]["tool_calls"] = [{"function": CALL}]
    assert made.chat_after(talk, 1, [], {}) == after
    talk[2]["role"] = "tool"
    assert made.chat_after(talk, 1, [], {}) is None
