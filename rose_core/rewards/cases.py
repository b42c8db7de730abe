"""Cases that a program is judged by, read from the forms that datasets have (pure).

| ``expected`` | cases |
|---|---|
| ``{"inputs": [...], "outputs": [...]}`` | what it reads and prints (APPS, TACO) |
| the same with ``fn_name`` | calls: arguments and results as JSON |
| ``[{"input": ..., "output": ...}, ...]`` | the same, one by one (LiveCodeBench) |
| ``["assert f(1) == 2", ...]`` | calls and literals (MBPP) |
| a text | JSON of one of these, or lines that begin with ``assert`` |

Each has two halves. ``given`` goes into a sandbox, ``expected`` stays where the comparison is, so
that no program can say what it has not computed. ``answers`` compares.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

MOST_CASES: Final = 1000
"""Of one program; datasets have some hundred at most."""
_MOST_ASSERT_CHARACTERS: Final = 100_000


class BadCases(ValueError):
    """What is no form of cases; says where, and what is expected."""


@dataclass(frozen=True)
class StdinCase:
    """A run of the program.

    Attributes:
        given: what it reads.
        expected: what it prints.
    """

    given: str
    expected: str


@dataclass(frozen=True)
class CallCase:
    """A call of one of its functions.

    Attributes:
        function: its name; a method of ``Solution`` where the program has such a class.
        given: the arguments, as JSON has them.
        expected: the result, as JSON has it.
        wrapped: ``expected`` may be a list around the result, as APPS and TACO write it.
    """

    function: str
    given: tuple[Any, ...]
    expected: Any
    wrapped: bool = False


@dataclass(frozen=True)
class AssertCase:
    """An expression and the literal that it is equal to.

    Attributes:
        given: source of the expression.
        expected: a value of Python.
    """

    given: str
    expected: Any


Case = StdinCase | CallCase | AssertCase


def read_cases(expected: object) -> tuple[Case, ...]:
    """The cases of one program; none where nothing is expected.

    Raises:
        BadCases: it is none of the forms.
    """
    if isinstance(expected, str):
        expected = _of_text(expected)
    if expected is None:
        return ()
    if isinstance(expected, dict):
        found = _of_columns(expected)
    elif isinstance(expected, list):
        found = [_of_entry(one, number) for number, one in enumerate(expected, 1)]
    else:
        raise BadCases(f"expected is {type(expected).__name__}; {_FORMS}")
    if len(found) > MOST_CASES:
        raise BadCases(f"expected has {len(found)} cases; {MOST_CASES} at most are run")
    return tuple(found)


_FORMS: Final = (
    'send {"inputs": [...], "outputs": [...]}, with "fn_name" for calls, or a list of '
    '{"input": ..., "output": ...} or of "assert f(...) == literal"'
)


def _of_text(text: str) -> object:
    if text.lstrip().startswith("assert"):
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadCases(f"expected is a text and no JSON ({error}); {_FORMS}") from error


def _of_columns(table: dict[str, Any]) -> list[Case]:
    known = {"inputs", "outputs", "fn_name"}
    if unknown := sorted(table.keys() - known):
        raise BadCases(f"expected has {', '.join(unknown)}; {_FORMS}")
    given, results = table.get("inputs"), table.get("outputs")
    if not isinstance(given, list) or not isinstance(results, list):
        raise BadCases(f"inputs and outputs are not two lists; {_FORMS}")
    if len(given) != len(results):
        raise BadCases(f"there are {len(given)} inputs and {len(results)} outputs; as many of both")
    name = table.get("fn_name")
    pairs = enumerate(zip(given, results, strict=True), 1)
    return [_case(name, one, result, number) for number, (one, result) in pairs]


def _of_entry(entry: object, number: int) -> Case:
    if isinstance(entry, str):
        return _of_assert(entry, number)
    if not isinstance(entry, dict) or "input" not in entry or "output" not in entry:
        raise BadCases(f"case {number} has no input and output; {_FORMS}")
    known = {"input", "output", "fn_name", "type", "testtype"}
    if unknown := sorted(entry.keys() - known):
        raise BadCases(f"case {number} has {', '.join(unknown)}; there are {', '.join(known)}")
    name = entry.get("fn_name")
    if name is None and (entry.get("type") or entry.get("testtype") or "stdin")[:5] != "stdin":
        raise BadCases(f"case {number} is a call: say which function by fn_name")
    return _case(name, entry["input"], entry["output"], number)


def _case(name: object, given: object, result: object, number: int) -> Case:
    if name is None:
        return StdinCase(_lines(given, f"input {number}"), _lines(result, f"output {number}"))
    if not isinstance(name, str) or not name.isidentifier():
        raise BadCases(f"fn_name is {name!r:.80}; expected the name of a function")
    if isinstance(given, list):
        return CallCase(name, tuple(given), result, wrapped=True)
    if isinstance(given, str) and isinstance(result, str):  # LiveCodeBench: JSON, a line for each
        lines = [line for line in given.splitlines() if line.strip()]
        arguments = tuple(_json(line, f"input {number}") for line in lines)
        return CallCase(name, arguments, _json(result, f"output {number}"))
    raise BadCases(
        f"case {number} of {name}: give the arguments as a list, or arguments and result as texts "
        "of JSON, a line for each argument"
    )


def _json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadCases(f"{where} is no JSON: {error}") from error


def _lines(value: object, where: str) -> str:
    """A text, also given as a list of its lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise BadCases(f"{where} is {value!r:.80}; without fn_name expected a text")


def _of_assert(text: str, number: int) -> AssertCase:
    """One line; what is equal to a literal is the expression that runs.

    Raises:
        BadCases: it is none, or compares two things that must both be computed.
    """
    where = f"case {number}, {text!r:.120}"
    try:
        if len(text) > _MOST_ASSERT_CHARACTERS:
            raise BadCases(f"{where}: it has over {_MOST_ASSERT_CHARACTERS} characters")
        body = ast.parse(text).body
        if len(body) != 1 or not isinstance(body[0], ast.Assert):
            raise BadCases(f"{where}: expected one line, assert f(...) == literal")
        return _of_test(body[0].test, where)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, BadCases):
            raise
        raise BadCases(f"{where}: it cannot be read: {error}") from error


def _of_test(test: ast.expr, where: str) -> AssertCase:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return AssertCase(f"bool({ast.unparse(test.operand)})", expected=False)
    if not isinstance(test, ast.Compare):
        return AssertCase(f"bool({ast.unparse(test)})", expected=True)
    if len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
        for computed, literal in (
            (test.left, test.comparators[0]),
            (test.comparators[0], test.left),
        ):
            known, value = _literal(literal)
            if known:
                return AssertCase(ast.unparse(computed), value)
    raise BadCases(
        f"{where}: only `assert f(...) == literal` is run, since what is expected never enters the "
        "program's sandbox"
    )


def _literal(node: ast.expr) -> tuple[bool, Any]:
    if (  # the one that has no literal
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id, node.args, node.keywords) == ("set", [], [])
    ):
        return True, set()
    try:
        return True, ast.literal_eval(node)
    except (ValueError, TypeError):
        return False, None


def program_of(answer: str) -> str:
    """The program in an answer: its last fenced block of code, or all of it.

    A last block that is not closed goes to the answer's end.
    """
    found: list[str] | None = None
    block: list[str] | None = None
    for line in answer.splitlines():
        if not line.lstrip().startswith("```"):
            if block is not None:
                block.append(line)
        elif block is None:
            block = []
        else:
            found, block = block, None
    last: Sequence[str] | None = block or found
    return answer if last is None else "\n".join(last) + "\n"
