"""Cases that a program is judged by, read from the forms that datasets have (pure).

| ``expected`` | cases |
|---|---|
| ``{"inputs": [...], "outputs": [...]}`` | what it reads and prints (APPS, TACO) |
| the same with ``fn_name`` | calls: arguments and results as JSON |
| ``[{"input": ..., "output": ...}, ...]`` | the same, one by one (LiveCodeBench) |
| ``["assert f(1) == 2", ...]`` | calls, and literals that their results are compared with (MBPP) |
| a text | JSON of one of these, or lines that begin with ``assert`` |

Each has two halves. ``given`` goes into a sandbox, ``expected`` stays where the comparison is, so
that no program can say what it has not computed. ``answers`` compares.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

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
class Near:
    """How far from a number another may be.

    Attributes:
        relative, absolute: as ``math.isclose`` has them.
        below: it is less than ``absolute`` away, and not just as much.
    """

    relative: float
    absolute: float
    below: bool = False


@dataclass(frozen=True)
class AssertCase:
    """A call and the literal that its result is compared with.

    Attributes:
        given: source of the call, in which nothing is compared.
        expected: a value of Python.
        near: how numbers are compared; None: as Python's ``==`` does.
        by_identity: by ``is``; ``expected`` is None, True or False.
    """

    given: str
    expected: Any
    near: Near | None = None
    by_identity: bool = False


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
        _check_count(len(expected))
        found = [_of_entry(one, number) for number, one in enumerate(expected, 1)]
    else:
        raise BadCases(f"expected is {type(expected).__name__}; {_FORMS}")
    _check_kinds(found)
    return tuple(found)


def _check_count(cases: int) -> None:
    """Before any is read: each takes its time."""
    if cases > MOST_CASES:
        raise BadCases(f"expected has {cases} cases; {MOST_CASES} at most are run")


def _check_kinds(found: Sequence[Case]) -> None:
    """One command runs all cases of a program."""
    for number, one in enumerate(found, 1):
        if type(one) is not type(found[0]):
            raise BadCases(
                f"case {number} is {_KINDS[type(one)]} and case 1 is {_KINDS[type(found[0])]}; "
                "send cases of one kind"
            )


_KINDS: Final = {
    StdinCase: "an input and output",
    CallCase: "a call by fn_name",
    AssertCase: "an assert",
}


_FORMS: Final = (
    'send {"inputs": [...], "outputs": [...]}, with "fn_name" for calls, or a list of '
    '{"input": ..., "output": ...} or of "assert f(...) == literal"'
)


_LINE: Final = re.compile(r"\S[^\n]*")


def _of_text(text: str) -> object:
    if text.lstrip().startswith("assert"):
        _check_count(sum(1 for _ in _LINE.finditer(text)))
        return [line[0].strip() for line in _LINE.finditer(text)]
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
    _check_count(len(given))
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
        lines = [line for line in given.split("\n") if line.strip()]
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
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if not isinstance(value, str):
        raise BadCases(f"{where} is {value!r:.80}; without fn_name expected a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = f"{where} has half a character at {error.start}, {value[error.start]!r}"
        raise BadCases(f"{message}; no program reads or prints it") from error
    return value


def _of_assert(text: str, number: int) -> AssertCase:
    """One line, taken apart: what is called, and what its result is compared with.

    Raises:
        BadCases: it is none, or it would have to be decided where the program runs.
    """
    where = f"case {number}, {text!r:.120}"
    try:
        if len(text) > _MOST_ASSERT_CHARACTERS:
            raise BadCases(f"{where}: it has over {_MOST_ASSERT_CHARACTERS} characters")
        body = ast.parse(text).body
        if len(body) != 1 or not isinstance(body[0], ast.Assert):
            raise BadCases(f"{where}: expected one line, assert f(...) == literal")
        found = _of_test(body[0].test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, BadCases):
            raise
        raise BadCases(f"{where}: it cannot be read: {error}") from error
    if found is None:
        raise BadCases(f"{where}: {_ASSERTS}")
    return found


_ASSERTS: Final = (
    "it is none of `assert f(...) == literal`, `f(...) is None`, True or False, "
    "`math.isclose(f(...), number, rel_tol=, abs_tol=)`, `abs(f(...) - number) < number`, "
    "`f(...)` and `not f(...)`, where what stands in a call are literals, names and objects that "
    "are made of them. What is expected must stay outside of the program's sandbox, so a test that "
    "compares within a call, two calls, or by anything else is not run"
)


def _of_test(test: ast.expr) -> AssertCase | None:
    """What is asserted; None: it is none of the forms.

    Whatever runs in the sandbox, the program can replace: what ``==`` says of its objects, ``abs``,
    ``math``. So only a result comes out, and all that says whether it is right stays here.
    """
    if isinstance(test, ast.Compare):
        return _of_comparison(test)
    if _dotted(test.func if isinstance(test, ast.Call) else test) in _IS_CLOSE:
        return _of_is_close(test) if isinstance(test, ast.Call) else None
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    call = test.operand if isinstance(test, ast.UnaryOp) and negated else test
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return None
    # Its answer is yes or no: that can be guessed, as it can without a sandbox.
    known = _has_inputs(call, names=False)
    return AssertCase(f"bool({ast.unparse(call)})", expected=not negated) if known else None


_IS_CLOSE: Final = frozenset({"math.isclose", "isclose"})
_SWAPPED: Final = {ast.Gt: ast.Lt, ast.GtE: ast.LtE}


def _of_comparison(test: ast.Compare) -> AssertCase | None:
    if len(test.ops) != 1:
        return None
    left, right, sign = test.left, test.comparators[0], type(test.ops[0])
    if sign in _SWAPPED:
        left, right, sign = right, left, _SWAPPED[sign]
    if sign in {ast.Lt, ast.LtE}:
        return _of_distance(left, right, below=sign is ast.Lt)
    if sign not in {ast.Eq, ast.Is}:
        return None
    computed, (known, value) = left, _literal(right)
    if not known:
        computed, (known, value) = right, _literal(left)
    if not known or not _is_computed(computed):
        return None
    if sign is ast.Is and not (value is None or isinstance(value, bool)):
        return None
    return AssertCase(ast.unparse(computed), value, by_identity=sign is ast.Is)


def _of_distance(distance: ast.expr, most: ast.expr, *, below: bool) -> AssertCase | None:
    """``abs(f(...) - number) < number``."""
    absolute = _number(most)
    if absolute is None or absolute < 0 or not _is_call_of(distance, "abs", 1):
        return None
    (difference,) = distance.args
    if not isinstance(difference, ast.BinOp) or not isinstance(difference.op, ast.Sub):
        return None
    return _near(difference.left, difference.right, Near(0.0, absolute, below))


def _of_is_close(test: ast.Call) -> AssertCase | None:
    """``math.isclose(f(...), number, rel_tol=number, abs_tol=number)``."""
    given = {one.arg: _number(one.value) for one in test.keywords}
    relative, absolute = given.pop("rel_tol", 1e-9), given.pop("abs_tol", 0.0)
    if len(test.args) != 2 or given or relative is None or absolute is None:
        return None
    if relative < 0 or absolute < 0:
        return None
    return _near(test.args[0], test.args[1], Near(relative, absolute))


def _near(one: ast.expr, other: ast.expr, near: Near) -> AssertCase | None:
    computed, literal = (one, other) if _is_computed(one) else (other, one)
    number = _number(literal)
    if number is None or not _is_computed(computed):
        return None
    return AssertCase(ast.unparse(computed), number, near)


def _is_call_of(node: ast.expr, name: str, arguments: int) -> TypeGuard[ast.Call]:
    """Of a function of this name with so many arguments, and nothing else."""
    return (
        isinstance(node, ast.Call)
        and _dotted(node.func) == name
        and len(node.args) == arguments
        and not node.keywords
    )


def _dotted(node: ast.expr) -> str:
    """A name as it is written, ``math.isclose``; empty: it is none."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id.startswith("__"):
        return ""
    return ".".join([node.id, *reversed(parts)])


_CONSTRUCTORS: Final = frozenset(
    {"set", "frozenset", "list", "tuple", "dict", "range", "float", "int", "str", "bytes"}
    | {"bytearray", "complex", "iter", "deque", "defaultdict"}
    | {"date", "time", "datetime", "timedelta"}
)
_INPUTS: Final = ast.Constant | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.Starred
_PARTS: Final = ast.expr_context | ast.operator | ast.unaryop | ast.keyword


def _has_inputs(call: ast.Call, *, names: bool) -> bool:
    """Whether a call's arguments hold no result of another one.

    Args:
        call: of a function or method.
        names: they may also hold what the program names, and objects of its classes.
    """
    found = [node for one in (*call.args, *call.keywords) for node in ast.walk(one)]
    functions = {id(one.func) for one in found if isinstance(one, ast.Call)}
    return all(id(one) in functions or _is_input(one, names=names) for one in found)


def _is_input(node: ast.AST, *, names: bool) -> bool:
    if isinstance(node, ast.BinOp | ast.UnaryOp):  # of a class of the program's it is a call
        return not any(
            isinstance(one, ast.Call) and _makes(one.func) == "own"
            for one in ast.iter_child_nodes(node)
        )
    if isinstance(node, _INPUTS | _PARTS):
        return True
    if isinstance(node, ast.Call):
        return _makes(node.func) in ({"known", "own"} if names else {"known"})
    return names and isinstance(node, ast.Name | ast.Attribute) and _dotted(node) != ""


def _makes(function: ast.expr) -> str:
    """Whether calling it makes an object: of a ``known`` class, or of one of the program's ``own``.

    Those are told from functions by their capital letter (PEP 8).
    """
    name = _dotted(function).rpartition(".")[2]
    if name in _CONSTRUCTORS:
        return "known"
    return "own" if name[:1].isupper() else ""


def _is_computed(node: ast.expr) -> bool:
    """Whether it is a result, alone on its way out: no literal meets it in the sandbox."""
    return any(isinstance(step, ast.Call) and _is_first(step) for step in _steps(node))


def _steps(node: ast.expr) -> Iterator[ast.expr]:
    """From the outermost expression inwards, as long as there is nothing beside the result."""
    found: ast.expr | None = node
    while found is not None:
        yield found
        found = _within(found)


def _within(node: ast.expr) -> ast.expr | None:
    """The result that it is made of: of a part, an attribute, a method or a function."""
    if isinstance(node, ast.Subscript):
        return node.value if _is_literal_index(node.slice) else None
    if isinstance(node, ast.Attribute):
        return None if node.attr.startswith("__") else node.value
    if not isinstance(node, ast.Call):
        return None
    if not node.args and not node.keywords:
        return _within(node.func)  # a method
    name, beside = _dotted(node.func), [one.value for one in node.keywords] + node.args[1:]
    # Digits and the order are no answer. Of all others only the result goes in.
    if beside and not (name in {"round", "sorted"} and len(beside) == 1 and _is_plain(beside[0])):
        return None
    return node.args[0] if name and node.args else None


def _is_plain(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _is_literal_index(node: ast.expr) -> bool:
    parts = [node.lower, node.upper, node.step] if isinstance(node, ast.Slice) else [node]
    return all(one is None or _literal(one)[0] for one in parts)


def _is_first(call: ast.Call) -> bool:
    """Whether it is a call of a function, or of an object's method, with inputs alone."""
    if not _has_inputs(call, names=True):
        return False
    function = call.func
    if _dotted(function):
        return _makes(function) != "known"  # ``list((1, 2))`` computes nothing
    # ``Solution().f(1)``, ``Point(1, 2).norm()``
    return (
        isinstance(function, ast.Attribute)
        and not function.attr.startswith("__")
        and isinstance(function.value, ast.Call)
        and bool(_makes(function.value.func))
        and _has_inputs(function.value, names=True)
    )


_WITHOUT_LITERAL: Final = {"set": set, "frozenset": frozenset, "tuple": tuple, "list": list}
_MOST_BITS: Final = 14_000
"""Of an integer: 4300 digits, which JSON's reader takes at most."""


def _literal(node: ast.expr) -> tuple[bool, Any]:
    """Whether it is one that a result can be equal to, and which."""
    if isinstance(node, ast.Call) and not node.keywords and len(node.args) <= 1:
        return _made_literal(node)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return False, None
    return _is_comparable(value), value


def _made_literal(node: ast.Call) -> tuple[bool, Any]:
    """What has no literal of its own: ``set((1, 2))``, ``float("inf")``."""
    name = _dotted(node.func)
    known, value = _literal(node.args[0]) if node.args else (True, ())
    if not known:
        return False, None
    if name == "float" and isinstance(value, str) and value.lower().lstrip("+-") in _INFINITE:
        return True, float(value)
    try:
        return (True, _WITHOUT_LITERAL[name](value)) if name in _WITHOUT_LITERAL else (False, None)
    except TypeError:  # of a number, or a set of lists
        return False, None


_INFINITE: Final = frozenset({"inf", "infinity"})


def _is_comparable(value: object) -> bool:
    """Whether a result can come out of the sandbox that is equal to it."""
    if isinstance(value, dict):
        return all(_is_comparable(one) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_comparable, value))
    if isinstance(value, int):
        return value.bit_length() <= _MOST_BITS
    return value is None or isinstance(value, str | float)


def _number(node: ast.expr) -> float | None:
    known, value = _literal(node)
    if not known or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer that no float holds
        return None


_FENCE: Final = re.compile(r"([ \t]*)(`{3,}|~{3,})(.*)", re.DOTALL)
_QUOTES: Final = re.compile(r'"{3}|\'{3}')
_LANGUAGES: Final = frozenset({"python", "python3", "py"})
# A fence may be that much deeper than the one that it closes (CommonMark 0.31, 4.5).
_DEEPER: Final = 3


def program_of(answer: str) -> str:
    """The program in an answer: its last fenced block of code, or all of it.

    A last block that is not closed goes to the answer's end. One in an item of a list loses its
    indentation. Fences in a text between three quotes are the program's own. Where there is no
    block, the last line that is code between two fences is the program.
    """
    lines = answer.split("\n")
    found = [block for block in _blocks(lines) if any(map(str.strip, block))]
    if found:
        return "\n".join(found[-1]) + "\n"
    single = [one for line in lines if (one := _single(line))]
    return single[-1] + "\n" if single else answer


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """What stands between fences (CommonMark, 4.5)."""
    # What an answer quotes outside of a block is a program's text, unless nothing ends it.
    balanced = not sum(map(_quotes, lines)) % 2
    number, quoted = 0, False
    while number < len(lines):
        line = lines[number]
        number += 1
        quoted ^= bool(balanced and _quotes(line) % 2)
        opened = None if quoted else _FENCE.fullmatch(line)
        if opened is not None and "`" not in opened[3]:
            end = _end(lines, number, opened)
            yield [_dedented(one, len(opened[1])) for one in lines[number:end]]
            number = end + 1


def _single(line: str) -> str:
    """The code of a line that begins and ends with a fence; empty: it is none."""
    line = line.strip()
    code = line[3:-3].strip()
    if not line.startswith("```") or not line.endswith("```") or "`" in code:
        return ""
    language, _, rest = code.partition(" ")
    return rest.lstrip() if language in _LANGUAGES else code


def _end(lines: Sequence[str], first: int, opened: re.Match[str]) -> int:
    """Where a block is closed: outside of a quotation, if there is such a place."""
    closed, quoted = len(lines), False
    for number in range(first, len(lines)):
        fence = _FENCE.fullmatch(lines[number])
        if fence and _closes(fence, opened):
            if not quoted:
                return number
            closed = min(closed, number)
        quoted ^= bool(_quotes(lines[number]) % 2)
    return closed


def _closes(fence: re.Match[str], opened: re.Match[str]) -> bool:
    return (
        not fence[3].strip()
        and fence[2].startswith(opened[2])
        and len(fence[1]) <= len(opened[1]) + _DEEPER
    )


def _quotes(line: str) -> int:
    return len(_QUOTES.findall(line))


def _dedented(line: str, indentation: int) -> str:
    blanks = len(line) - len(line.lstrip(" \t"))
    return line[min(blanks, indentation) :]
