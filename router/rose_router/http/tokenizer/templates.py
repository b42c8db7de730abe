"""A model's chat template, run as its makers run it (transformers' rules), in jinja's sandbox.

The template came with the model, so it may compute a text and nothing else, and not without end:
each rendering has a budget of processor time and of characters (``_Budget``), charged where
templates make something: at every round of a loop, call of a macro, filter, test, call,
concatenation and sum. What makes much of little (widths, powers, long ranges) is refused by its
arguments, before it is made.

What transformers gives templates beside the conversation: ``raise_exception``, ``strftime_now``, a
``tojson`` that escapes no HTML, loop controls, and ``{% generation %}`` blocks, which mark what a
trainer learns from and change nothing in a prompt.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Mapping, Set, ValuesView
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from rose_router.errors import BadRequest
from rose_router.http.tokenizer.locality import is_local

_SECONDS = 5.0
"""Of the thread's processor time; 1,000 messages take 0.05."""
_LOOK = 32
"""Steps between two looks at the clock: it costs more than a step."""
_CHARACTERS = 64 << 20
_TIMES = 64
"""What a rendering may make in all: so much, and so many times what it was given."""
_ENTRY = 8  # bytes of a place in a list
_MOST_NUMBER = 100_000
"""A width, a count, an exponent: no template asks for so much, and larger ones fill the memory."""
_MOST_DIGITS = 4000  # of a whole number; Python's own limit for texts of them
_NUMBERS = re.compile(r"\d+")
_NESTED = re.compile(r"\{[^{}]*\{")  # a width that is an argument
_MOST_BETWEEN = 16  # characters between the parts of a JSON text, of one level of its indent
_OF_TEXT = frozenset(
    {"capitalize", "e", "escape", "format", "indent", "lower", "replace", "safe", "string"}
    | {"striptags", "title", "trim", "truncate", "upper", "wordcount"}
)
"""Filters that begin with the text of whatever they are given."""
_COMPARING = frozenset(
    {"sort", "unique", "min", "max", "groupby", "dictsort", "in", "eq", "equalto", "==", "ne", "!="}
    | {"lt", "lessthan", "<", "gt", "greaterthan", ">", "le", "<=", "ge", ">="}
)
"""Filters and tests that may look at all that is inside what they are given."""
_FILTERS = frozenset(
    {"abs", "attr", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape"}
    | {"first", "float", "format", "groupby", "indent", "int", "items", "join", "last", "length"}
    | {"list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round"}
    | {"safe", "select", "selectattr", "slice", "sort", "string", "striptags", "sum", "title"}
    | {"tojson", "trim", "truncate", "unique", "upper", "wordcount"}
)


class _Budget:
    """What is left of one rendering."""

    def __init__(self, characters: int) -> None:
        self.characters = characters
        self._steps = 0
        self._until = time.thread_time() + _SECONDS

    def charge(self, made: int) -> None:
        """Count a step that makes so many characters, or entries of a list.

        Raises:
            ValueError: the budget is spent.
        """
        self.characters -= made + 1
        if self.characters < 0:
            raise ValueError("it makes more text than a conversation can need")
        self._steps += 1
        if not self._steps % _LOOK and time.thread_time() > self._until:
            message = f"it computes for more than {_SECONDS:g} s"
            raise ValueError(message)


_BUDGET: ContextVar[_Budget] = ContextVar("_BUDGET")


def _spend(*made: object) -> None:
    """Charge what is about to be made of these, or a step."""
    _BUDGET.get().charge(sum(map(_size, made)))


def _size(value: object) -> int:
    if isinstance(value, int):
        if value.bit_length() > _MOST_DIGITS:
            raise ValueError("a number is too large")
        return 8
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple | dict | set | frozenset):
        return len(value) * _ENTRY
    return 16


def _charge_text(*values: object) -> int:
    """Charge the text of these, all that is inside them too, before it is made; its length."""
    length = 0
    for value in values:
        if isinstance(value, str):  # nearly all there are
            _BUDGET.get().charge(len(value))
            length += 4 + len(value)
        elif isinstance(value, Mapping):
            length += 4 + _charge_text(*value.keys(), *value.values())
        elif isinstance(value, list | tuple | Set | ValuesView):
            length += 4 + _charge_text(*value)
        else:
            made = _size(value)
            _BUDGET.get().charge(made)
            length += made + 4
    return length


def _charge_entries(*values: object) -> None:
    """Charge all that is inside these, which a comparison may look at in one step of ours."""
    for value in values:
        inner = value.values() if isinstance(value, Mapping) else value
        if isinstance(inner, list | tuple | Set | ValuesView):
            _BUDGET.get().charge(len(inner))
            _charge_entries(*inner)


def _check_arguments(*values: object) -> None:
    """Refuse what would make much of little."""
    for value in values:
        if isinstance(value, int) and abs(value) > _MOST_NUMBER:
            message = f"{value:.10g} is more than {_MOST_NUMBER}"
            raise ValueError(message)
        if isinstance(value, list | tuple) and len(value) < 8:
            _check_arguments(*value)


class _Namespace(Namespace):
    """What ``set`` changes; its text does not show what is in it."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a budget for all that is made in it."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "//", "-", "/"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401  # a template's values
        """One of the operators above."""
        if operator == "+" and type(left) is str and type(right) is str:  # nearly all there are
            _BUDGET.get().charge(len(left) + len(right))
            return left + right
        if operator == "**":
            _check_arguments(left, right)
            bits = left.bit_length() if isinstance(left, int) else 64
            _BUDGET.get().charge(bits * abs(right) // 8 if isinstance(right, int) else 8)
        elif operator == "*":
            both = [(left, right), (right, left)]
            times = next((n for n, of in both if isinstance(n, int) and not _is_number(of)), 1)
            _check_arguments(times)
            of = right if times is left else left
            _BUDGET.get().charge((_size(of) + 1) * max(0, times))
        elif operator == "%" and isinstance(left, str):
            _charge_form(left, left.count("%"), right)
        else:
            _spend(left, right)
        return super().call_binop(context, operator, left, right)

    def call(  # a template names its arguments as it likes
        self,
        context: Any,  # noqa: ANN401
        called: Any,  # noqa: ANN401
        /,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """A method, a macro, a function."""
        if called in _OWN:
            return called(*args)
        name, of = getattr(called, "__name__", ""), getattr(called, "__self__", None)
        if name == "join" and isinstance(of, str) and len(args) == 1 and not _is_text(args[0]):
            args = (list(args[0]),)  # also what comes one by one is counted before it is joined
        _grow(name, of, args, kwargs)
        made = super().call(context, called, *args, **kwargs)
        _spend(made)
        return made

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:  # noqa: ANN401  # jinja's own
        """``str.format``, which the sandbox replaces before it is called."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401  # a template's values
            form = str(value.__self__)
            if _NESTED.search(form.replace("{{", "").replace("}}", "")):
                raise ValueError("a width that is an argument is not for templates")
            _charge_form(form, form.count("{"), *args, *kwargs.values())
            return wrapped(*args, **kwargs)

        return bounded


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _is_text(value: object) -> bool:
    return isinstance(value, str | bytes)


def _check_form(form: str, *values: object) -> None:
    """Refuse widths: ``%9999999d``, ``{:>9999999}``, ``%*d``."""
    if any(len(found) > 5 for found in _NUMBERS.findall(form)) or "*" in form:
        raise ValueError("a format is wider than a text can be")
    _check_arguments(*values)


def _charge_form(form: str, places: int, *values: object) -> None:
    """Charge a format: it may show all of its arguments in each of its places, each so wide."""
    _check_form(form, *values)
    widths = sum(int(found) for found in _NUMBERS.findall(form))
    _BUDGET.get().charge(len(form) + widths + places * _charge_text(*values))


def _grow(name: str, of: object, args: tuple[Any, ...], more: Mapping[str, Any]) -> None:
    """Charge what a method or filter makes of these before it does, or refuse it."""
    match name, args:
        case "replace", (old, new, *_) if isinstance(of, str):
            _charge_text(old, new)
            _BUDGET.get().charge(of.count(str(old)) * len(str(new)) + len(of))
        case "join", (parts,) if isinstance(of, str):
            _BUDGET.get().charge(len(parts) * (len(of) + 1))
            _charge_text(parts)
        case (("split" | "rsplit" | "splitlines"), _) if isinstance(of, str):
            sep = str(args[0]) if args and args[0] else ""
            parts = of.count(sep) if sep else of.count(" ") + of.count("\n")
            _BUDGET.get().charge(len(of) + parts * 8 * _ENTRY)
        case (("count" | "index"), _) if isinstance(of, list | tuple):
            _charge_entries(of, *args)
        case "expandtabs", _ if isinstance(of, str | bytes):
            tabs = of.count("\t") if isinstance(of, str) else of.count(b"\t")
            widths = [*args, *more.values(), 8]
            _check_arguments(*widths)
            _BUDGET.get().charge(tabs * max(int(one) for one in widths))
        case (("translate" | "maketrans"), _):
            raise ValueError("str.translate is not for templates")
        case _ if isinstance(of, str | bytes | list | tuple):
            _check_arguments(*args, *more.values())
    _spend()


def _bounded(name: str, made_by: Any) -> Callable[..., Any]:  # noqa: ANN401  # jinja's own
    """A filter or test that charges what it makes."""
    skipped = 1 if hasattr(made_by, "jinja_pass_arg") else 0

    @functools.wraps(made_by)
    def bounded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # a template's values
        value, rest = args[skipped], [*args[skipped + 1 :], *kwargs.values()]
        _check_arguments(*(one for one in rest if name not in ("default", "d", "in")))
        if name in _COMPARING:
            _charge_entries(value, *rest)
        if name in ("list", "sort", "unique") and isinstance(value, str):
            _BUDGET.get().charge(len(value) * 8 * _ENTRY)
        if name in _OF_TEXT and not isinstance(value, str):
            _charge_text(value)
        if name == "join":
            value = list(value)
            args = (*args[:skipped], value, *args[skipped + 1 :])
            _BUDGET.get().charge(len(value) * _charge_text(*rest[:1]))
            _charge_text(value)
        elif name == "replace":
            _grow(name, str(value), tuple(rest), {})
        elif name == "format":
            form = str(value)
            _charge_form(form, form.count("%"), *rest)
        elif name == "sum" and any(not _is_number(one) for one in rest):
            raise ValueError("sum is for numbers")
        elif name == "indent":
            width = rest[0] if rest else 4
            wide = width if isinstance(width, int) else _size(width)
            _BUDGET.get().charge(str(value).count("\n") * wide)
        made = made_by(*args, **kwargs)
        _spend(made)
        return made

    return bounded


class _Counted(Extension):
    """What charges loops, macros, concatenations and output; jinja has no hook for them."""

    def parse(self, parser: Parser) -> NoReturn:
        """It has no tag."""
        raise NotImplementedError

    @staticmethod
    def step() -> str:
        """A round of a loop, a call of a macro."""
        _BUDGET.get().charge(0)
        return ""

    @staticmethod
    def joined(*parts: object) -> str:
        """``a ~ b``."""
        _charge_text(*parts)
        return "".join(str(one) for one in parts)

    @staticmethod
    def compared(value: object) -> object:
        """A side of ``==``, ``<``, ``in`` and the like."""
        _charge_entries(value)
        return value

    @staticmethod
    def shown(value: object) -> object:
        """``{{ value }}``, which a block may keep."""
        _charge_text(value)
        return value if isinstance(value, str | int) else str(value)

    @staticmethod
    def written(characters: int) -> str:
        """The template's own text."""
        _BUDGET.get().charge(characters)
        return ""


_OWN = frozenset(
    {_Counted.step, _Counted.joined, _Counted.compared, _Counted.shown, _Counted.written}
)
"""What ``_Instrument`` puts into templates; a template itself cannot name them."""


class _Instrument(NodeTransformer):
    """Puts ``_Counted``'s charges into a template."""

    def __init__(self, counted: _Counted) -> None:
        self._counted = counted

    def _call(self, name: str, *given: nodes.Expr) -> nodes.Call:
        return nodes.Call(self._counted.attr(name), list(given), [], None, None)

    def _body(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._call("step")))
        return node

    visit_For = visit_Macro = visit_CallBlock = _body  # noqa: N815  # as jinja calls them

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._call("joined", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = self._call("compared", node.expr)
        for operand in node.ops:
            operand.expr = self._call("compared", operand.expr)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        own = sum(len(one.data) for one in node.nodes if isinstance(one, nodes.TemplateData))
        node.nodes = [
            one if isinstance(one, nodes.TemplateData) else self._call("shown", one)
            for one in node.nodes
        ]
        if own:
            node.nodes.insert(0, self._call("written", nodes.Const(own)))
        return node


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

    Attributes:
        is_local: no word far away changes what it writes behind an answer (``locality``).

    Raises:
        BadRequest: it is broken.
    """

    def __init__(self, text: str) -> None:
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation, _Counted],
            optimized=False,  # constants would be computed without a budget
        )
        environment.filters = {
            name: _bounded(name, made_by)
            for name, made_by in [*environment.filters.items(), ("tojson", _to_json)]
            if name in _FILTERS
        }
        environment.tests = {
            name: _bounded(name, made_by) for name, made_by in environment.tests.items()
        }
        del environment.globals["lipsum"]  # makes text of nothing
        environment.globals["namespace"] = _Namespace
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        counting = next(e for e in environment.extensions.values() if isinstance(e, _Counted))
        try:
            parsed = environment.parse(text)
            self.is_local = is_local(parsed)
            tree = _Instrument(counting).visit(parsed)
            code = environment.compile(tree)
            self._template = environment.template_class.from_code(
                environment, code, environment.make_globals(None)
            )
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            message = f"the model's chat template is broken ({error}); send token ids as input_ids"
            raise BadRequest("NoTemplate", message) from error

    def render(self, **names: Any) -> str:  # noqa: ANN401  # whatever the template asks for
        """The text of a conversation.

        Raises:
            BadRequest: the template does not take it, or would make too much of it.
        """
        given = sum(_weight(value) for value in names.values())
        token = _BUDGET.set(_Budget(_CHARACTERS + _TIMES * given))
        try:
            return self._template.render(**names)
        except _REFUSALS as error:
            message = f"messages: the model's chat template refuses them: {error}"
            raise BadRequest("InvalidTurn", message) from error
        finally:
            _BUDGET.reset(token)


_REFUSALS = (
    *(jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError),
    *(ArithmeticError, RecursionError, MemoryError, NotImplementedError),
)


def _weight(value: object) -> int:
    """Characters of a conversation, about."""
    if isinstance(value, Mapping):
        return sum(8 + _weight(one) for one in value.values())
    if isinstance(value, list | tuple):
        return sum(map(_weight, value))
    return _size(value) if isinstance(value, str) else 8


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML, which no model was trained on.
    _charge_text(value)
    between = [_size(one) for one in separators or ()]
    level = indent if isinstance(indent, int) else _size(indent or "")
    if max(level, *between, 0) > _MOST_BETWEEN:
        raise ValueError("a JSON text is wider than a conversation can need")
    if level:
        _BUDGET.get().charge(_entries(value, level))
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _entries(value: object, width: int, depth: int = 1) -> int:
    """Characters of the indents of a JSON text; at each level so many more."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return 0
    _BUDGET.get().charge(0)
    return (len(value) + 1) * width * depth + sum(_entries(v, width, depth + 1) for v in value)


def _now(form: str) -> str:
    _check_form(form)
    return datetime.now().strftime(form)  # noqa: DTZ005  # models were trained on local dates


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
