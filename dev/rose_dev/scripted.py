"""Models that say what a script tells, to harnesses that want calls of their own tools.

The chat template ends a prompt with a token that stands for one answer of one script, and every
token has one successor. What is said is cut into tokens that no tokenizer makes of the same text:
a history that is tokenized again shows at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

END = 256
"""Ends an answer; ids below are bytes, the next one is padding."""

_START = "<|start|>"
_ASKS = "<|say"

# Which script: the first whose tool is among those shown. Which answer: as many as were given.
_TEMPLATE = """
{%- set ns = namespace(turn=0, script=-1, tools=[]) -%}
{%- for tool in tools or [] -%}
{%- set ns.tools = ns.tools + [tool.function.name] -%}
{%- endfor -%}
{%- for name, last in scripts -%}
{%- if ns.script < 0 and (not name or name in ns.tools) -%}
{%- set ns.script = loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- if tools %}<|start|>tools: {{ tools | tojson }}<|end|>{% endif -%}
{%- for message in messages -%}
<|start|>{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- set called = call.function %}
{{- '<tool_call>' }}{"name": {{ called.name | tojson }},
{{- ' "arguments": ' }}{{ called.arguments | tojson }}}
{{- '</tool_call>' }}
{%- endfor %}<|end|>
{%- if message.role == 'assistant' %}{% set ns.turn = ns.turn + 1 %}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant: <|say
{{- ns.script }}.{{ [ns.turn, scripts[ns.script][1]] | min }}|>{% endif -%}
"""


@dataclass(frozen=True)
class Script:
    """What a scripted model says where it is shown a tool.

    Attributes:
        tool: name of the tool; empty = whatever it is shown.
        answers: in order; the last one is said again and again.
    """

    tool: str
    answers: tuple[str, ...]


def template(scripts: Sequence[Script]) -> str:
    """The chat template: which answer comes next stands at a prompt's end."""
    known = [(script.tool, len(script.answers) - 1) for script in scripts]
    return f"{{%- set scripts = {json.dumps(known)} -%}}{_TEMPLATE.strip()}"


def tokens(scripts: Sequence[Script]) -> dict[str, int]:
    """All words and their ids: bytes, end, padding, what begins a message, then the answers.

    An answer's pieces follow the special word that asks for it. No two pieces are equal.

    Raises:
        ValueError: two answers are equal, or one has less than two bytes.
    """
    found = [*byte_tokens(), "<|end|>", "<|pad|>", _START]
    for number, script in enumerate(scripts):
        for turn, answer in enumerate(script.answers):
            found += [f"{_ASKS}{number}.{turn}|>", *_cut(answer.encode(), found)]
    return {token: place for place, token in enumerate(found)}


def is_mark(token: str) -> bool:
    """Whether the word is a special one of a scripted model."""
    return token == _START or token.startswith(_ASKS)


def successors(scripts: Sequence[Script]) -> list[int]:
    """Successor of every id: along an answer to its end."""
    known = tokens(scripts)
    asks = [place for token, place in known.items() if token.startswith(_ASKS)]
    lasts = {place - 1 for place in asks} | {len(known) - 1}
    return [
        place + 1 if place >= asks[0] and place not in lasts else END for place in range(len(known))
    ]


def byte_tokens() -> list[str]:
    """The word that stands for each byte in byte-level tokenizers, so that id = byte.

    Visible Latin-1 characters stand for themselves; the others follow from U+0100 on.
    """
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)]


def _cut(text: bytes, taken: Sequence[str]) -> list[str]:
    """The text in words that are not taken, each as short as can be but of two bytes at least."""
    letters = byte_tokens()
    pieces: list[str] = []
    piece = ""
    for byte in text:
        piece += letters[byte]
        if len(piece) > 1 and piece not in taken and piece not in pieces:
            pieces.append(piece)
            piece = ""
    while piece and (len(piece) < 2 or piece in taken or piece in pieces):
        if not pieces:
            raise ValueError(f"answer {text!r:.60} is another one's, or of less than two bytes")
        piece = pieces.pop() + piece
    return [*pieces, piece] if piece else pieces
