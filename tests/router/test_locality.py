"""What a local template shows behind an answer does not depend on words far away."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import jinja2
import pytest

from rose_dev.models import scripted_recipe
from rose_dev.scripted import Script
from rose_router.http.tokenizer.locality import ITERATORS
from rose_router.http.tokenizer.templates import _FILTERS, Template
from rose_router.http.tokenizer.tokenization import Tokenizer
from tests.router.conftest import Stage
from tests.router.scripts import Follows, folder

Staging = Callable[..., AbstractAsyncContextManager[Stage]]
ENDS = "{% if add_generation_prompt %}<|start|>assistant: <|say0.0|>{% endif %}"
PLAIN = "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
LOCAL = {
    "each by itself": PLAIN,
    "system first": (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
        "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    ),
    "results in one": (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|start|>user: {% endif %}"
        "[{{ m.content }}]{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>"
        "{% endif %}{% else %}<|start|>{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ loop.index }}. {{ c.function.name }}{% endfor %}"
        "<|end|>{% endif %}{% endfor %}"
    ),
    "tools at the first": (
        "{% set ns = namespace(names=[]) %}{% for t in tools or [] %}"
        "{% set ns.names = ns.names + [t.function.name] %}{% endfor %}"
        "{% for m in messages %}{% if loop.index0 == 0 %}{{ ns.names }}{% endif %}"
        "{% if loop.nextitem is defined and loop.nextitem.role == m.role %}+{% endif %}"
        "{{ m.role }}: {{ m.content }}<|end|>{% endfor %}{{ messages[-1].role }}"
    ),
    "iterators that are read where they are made": (
        "{% set names = (tools or []) | map(attribute='function') | map('upper') | list %}"
        "{% for n in ['a', 'b'] | reject('equalto', 'b') %}{{ n }}{% endfor %}"
        "{{ ['x', 'y'] | reverse | join(', ') }}"
        "{% for m in messages %}{% set its = [1, 2] | batch(1) %}{{ its | first }}"
        "{{ names }}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    ),
}
NOT = {
    "a switch": (
        "{% set ns = namespace(think=true) %}{% for m in messages %}"
        "{% if '/no_think' in m.content %}{% set ns.think = false %}{% endif %}"
        "{{ m.role }}: {{ m.content }}<|end|>{% endfor %}{{ ns.think }}"
    ),
    "a switch in a macro": (
        "{% set ns = namespace(n=0) %}{% macro show(m) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
        "{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}"
    ),
    "numbers": "{% for m in messages %}{{ loop.index }}: {{ m.content }}{% endfor %}",
    "numbers by another name": "{% for m in messages %}{{ loop['index'] }}{% endfor %}",
    "how many": PLAIN + "{{ messages | length }}",
    "how many in the loop": "{% for m in messages %}{{ loop.length }}{% endfor %}",
    "the second": "{{ messages[1].content }}" + PLAIN,
    "the first of a rest": "{% set rest = messages[1:] %}{{ rest[0].content }}" + PLAIN,
    "a rest of a rest": (
        "{% set a = messages[1:] %}{% set b = a[1:] %}{% for m in b %}{{ m.role }}{% endfor %}"
    ),
    "far away": "{% for m in messages %}{{ messages[loop.index0 - 3].content }}{% endfor %}",
    "any place": (
        "{% set x = 2 %}{% for m in messages %}{{ messages[x + loop.index0].role }}{% endfor %}"
    ),
    "the place of another loop": (
        "{% for m in messages %}{% for c in [1, 2] %}{{ messages[loop.index0].content }}"
        "{% endfor %}{% endfor %}"
    ),
    "all in each": (
        "{% for m in messages %}{% for o in messages %}{{ o.role }}{% endfor %}{% endfor %}"
    ),
    "some": "{% for m in messages if m.role == 'user' %}{{ loop.first }}{% endfor %}",
    "an end": "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{% endfor %}",
    "in turn": "{% set c = cycler(1, 2) %}{% for m in messages %}{{ c.next() }}{% endfor %}",
    "what changed": "{% for m in messages %}{{ loop.changed(m.role) }}{% endfor %}",
    "handed on": "{% set all = [messages] %}" + PLAIN + "{{ all }}",
    "another list": "{% set messages = tools %}" + PLAIN,
    "an iterator in a namespace": (
        "{% set ns = namespace(it=range(9) | batch(1)) %}"
        "{% for m in messages %}{{ ns.it | first }}{% endfor %}"
    ),
    "an iterator in a list": (
        "{% set all = [range(9) | batch(1)] %}"
        "{% for m in messages %}{{ all[0] | first }}{% endfor %}"
    ),
    "a list of iterators": (
        "{% set all = [[1, 2]] | map('batch', 1) | list %}"
        "{% for m in messages %}{{ all[0] | first }}{% endfor %}"
    ),
    "an iterator behind a default": (
        "{% set it = range(9) | batch(1) | default([]) %}"
        "{% for m in messages %}{{ it | first }}{% endfor %}"
    ),
    "an iterator around the loop": (
        "{% with it = range(9) | batch(1) %}{% for m in messages %}{{ it | first }}{% endfor %}"
        "{% endwith %}"
    ),
}
NOT_TAKEN = (TypeError, ValueError, AttributeError, AssertionError, jinja2.TemplateError)
KEPT = {
    "batch": "range(9) | batch(1)",
    "items": "{'a': 1, 'b': 2} | items",
    "map": "['a', 'b'] | map('upper')",
    "reject": "['a', 'b'] | reject('equalto', 'c')",
    "rejectattr": "[{'a': 1}] | rejectattr('b')",
    "reverse": "[1, 2] | reverse",
    "select": "['a', 'b'] | select('equalto', 'a')",
    "selectattr": "[{'a': 1}] | selectattr('a')",
    "slice": "range(9) | slice(3)",
    "unique": "[1, 2] | unique",
}


def conversation(dice: random.Random, turns: int) -> list[dict[str, Any]]:
    """People's words, answers, and rounds of tools."""
    talk: list[dict[str, Any]] = []
    if dice.random() < 0.5:
        talk.append({"role": "system", "content": "be kind"})
    for turn in range(turns):
        talk.append({"role": "user", "content": dice.choice(("a", "/no_think b", f"c{turn}"))})
        for _ in range(dice.randrange(3)):
            calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]
            talk.append({"role": "assistant", "content": "", "tool_calls": calls})
            talk += [{"role": "tool", "content": f"r{turn}"}] * dice.randrange(1, 3)
        talk.append({"role": "assistant", "content": f"answer {turn}"})
    return [*talk, {"role": "user", "content": "and now?"}]


def speaking(template: str, into: Path) -> Path:
    """A scripted model with another template."""
    model = folder(RECIPE)
    for one in model.iterdir():
        if one.name != "chat_template.jinja" and one.is_file():
            (into / one.name).write_bytes(one.read_bytes())
    (into / "chat_template.jinja").write_text(template)
    return into


RECIPE = scripted_recipe("scripted-chat", Script("", ("Quite so, I think.",)))


@pytest.mark.parametrize("name", LOCAL)
def test_a_local_template_shows_the_same_behind_an_answer_without_what_is_far_away(
    name: str, tmp_path: Path
) -> None:
    template = LOCAL[name] + ENDS
    assert Template(template).is_local
    words = Tokenizer(speaking(template, tmp_path))
    dice = random.Random(name)
    for turns in range(1, 25):
        talk = conversation(dice, turns)
        answer = len(talk) - 2
        whole = words._shown_after(talk, answer, [], {})  # what all is compared with
        assert words.chat_after(talk, answer, [], {}) == words.encode(whole or "", special=False)
    assert words._is_local  # no doubling found a difference


@pytest.mark.parametrize("name", NOT)
def test_what_no_rule_knows_is_not_local(name: str) -> None:
    assert not Template(NOT[name]).is_local


@pytest.mark.parametrize("name", KEPT)
def test_an_iterator_from_before_the_loop_is_not_local_for_what_it_lost_stays_lost(
    name: str,
) -> None:
    made = f"{{% set it = {KEPT[name]} %}}"
    shows = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ it | first }};{% endif %}{% endfor %}"
    )
    assert not Template(made + shows).is_local
    talk = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    first, second, _ = Template(made + shows).render(messages=talk).split(";")
    assert first != second


def made_by(name: str) -> Iterator[object]:
    """What a filter makes of a few values with a few arguments, of those that it takes."""
    environment = jinja2.Environment(autoescape=False)  # noqa: S701  # no page is made
    for value in (["a", "b"], {"a": 1}):
        for arguments in ([], [1], ["upper"], ["a"]):
            with contextlib.suppress(*NOT_TAKEN):
                context = environment.from_string("").new_context()
                yield environment.call_filter(name, value, arguments, context=context)


def test_every_filter_whose_result_is_used_up_is_known() -> None:
    names = _FILTERS & jinja2.filters.FILTERS.keys()
    used_up = {name for name in names if any(hasattr(one, "__next__") for one in made_by(name))}
    assert used_up == ITERATORS == KEPT.keys()


async def talked(s: Stage, monkeypatch: pytest.MonkeyPatch, turns: int) -> tuple[int, int]:
    """A chat in which a person speaks at every turn: characters rendered, and said."""
    rendered, render = 0, Template.render

    def counting(template: Template, **names: Any) -> str:  # noqa: ANN401  # as the method
        nonlocal rendered
        text = render(template, **names)
        rendered += len(text)
        return text

    monkeypatch.setattr(Template, "render", counting)
    talk: list[dict[str, Any]] = [{"role": "system", "content": "be kind"}]
    for turn in range(turns):
        talk.append({"role": "user", "content": f"question {turn} " + "word " * 20})
        body = {"messages": talk, "max_tokens": 80, "rose": {"session": f"of-{turns}"}}
        async with s.post("/v1/chat/completions", body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
        (choice,) = answer["choices"]
        assert choice["rose"]["history"]["known_messages"] == (len(talk) - 1 if turn else 0)
        talk.append(choice["message"])
    monkeypatch.undo()
    return rendered, sum(len(str(one)) for one in talk)


async def test_a_chat_of_a_hundred_turns_costs_what_its_messages_are_long(
    stage: Staging, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with stage(tokenizer=speaking(PLAIN + ENDS, tmp_path)) as s:
        await s.engine(script=Follows(RECIPE), token_seconds=0.0001)
        spent = {turns: await talked(s, monkeypatch, turns) for turns in (50, 100)}
    for rendered, reported in spent.values():
        assert rendered < 8 * reported
    # Twice the turns: about twice the work, where the square would be four times.
    assert spent[100][0] < 2.6 * spent[50][0]
