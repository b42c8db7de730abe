"""A model's chat template, run as its makers run it (transformers' rules), in jinja's sandbox.

The template came with the model, so it may compute a text and nothing else. What transformers gives
templates beside the conversation: ``raise_exception``, ``strftime_now``, a ``tojson`` that escapes
no HTML, loop controls, and ``{% generation %}`` blocks, which mark what a trainer learns from and
change nothing in a prompt.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rose_router.errors import BadRequest


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``: what stands in between."""

    tags = {"generation"}  # noqa: RUF012  # as jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Leave the block's own statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Template:
    """One template.

    Args:
        text: its source.

    Raises:
        BadRequest: it is broken.
    """

    def __init__(self, text: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            message = f"the model's chat template is broken ({error}); send token ids as input_ids"
            raise BadRequest("NoTemplate", message) from error

    def render(self, **names: Any) -> str:  # noqa: ANN401  # whatever the template asks for
        """The text of a conversation.

        Raises:
            BadRequest: the template does not take it.
        """
        try:
            return self._template.render(**names)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            message = f"messages: the model's chat template refuses them: {error}"
            raise BadRequest("InvalidTurn", message) from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  # models were trained on local dates


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
