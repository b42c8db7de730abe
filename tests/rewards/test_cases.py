"""Cases of programs: the forms that data sets have, and what counts as an answer."""

from __future__ import annotations

import ast
import json
import tracemalloc
from fractions import Fraction

import pytest

from rose_core.rewards.answers import is_answer
from rose_core.rewards.cases import (
    AssertCase,
    BadCases,
    CallCase,
    Case,
    StdinCase,
    program_of,
    read_cases,
)
from rose_rewards import program_cases


def test_the_forms_of_data_sets_give_the_same_cases() -> None:
    columns = {"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", ["4", "6"]]}
    wanted = (StdinCase("1\n", "2\n"), StdinCase("2\n3", "4\n6"))
    entries = [
        {"input": "1\n", "output": "2\n", "testtype": "stdin"},
        {"input": "2\n3", "output": "4\n6", "type": "stdin_stdout"},
    ]
    for expected in (columns, json.dumps(columns), entries, json.dumps(entries)):
        assert read_cases(expected) == wanted
    assert read_cases(None) == read_cases([]) == read_cases({"inputs": [], "outputs": []}) == ()


def test_a_line_of_json_ends_at_a_line_feed_alone() -> None:
    entries = [{"input": '"a\u2028b"\r\n2', "output": '"\x85"', "fn_name": "f"}]
    assert read_cases(entries) == (CallCase("f", ("a\u2028b", 2), "\x85"),)


def test_calls_have_arguments_as_lists_or_as_lines_of_json() -> None:
    assert read_cases({"inputs": [[1, [2]]], "outputs": [[3]], "fn_name": "f"}) == (
        CallCase("f", (1, [2]), [3], wrapped=True),
    )
    entries = [{"input": "[1]\n2", "output": "true", "fn_name": "f", "testtype": "functional"}]
    assert read_cases(entries) == (CallCase("f", ([1], 2), expected=True),)


def test_asserts_are_a_list_or_lines() -> None:
    lines = ["assert f('\u2028') == 1", "assert f(2) == 2, 'a message'"]
    wanted = (AssertCase("f('\\u2028')", 1), AssertCase("f(2)", 2))
    assert read_cases(lines) == read_cases("\n\n  ".join(lines) + "\r\n") == wanted


@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        (7, "expected is int; send"),
        ("no JSON", "expected is a text and no JSON"),
        ("[" * 100_000, "expected is a text and no JSON"),
        ({"inputs": ["1"]}, "are not two lists"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": [], "more": 1}, "expected has more"),
        ({"inputs": [1], "outputs": ["1"]}, "input 1 is 1; without fn_name"),
        ({"inputs": [["1"]], "outputs": [1], "fn_name": "f()"}, "fn_name is 'f()'"),
        ({"inputs": ["1"], "outputs": ["x"], "fn_name": "f"}, "output 1 is no JSON"),
        ([{"input": "1"}], "case 1 has no input and output"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "which function by fn_name"),
        (["import os"], "expected one line"),
        (["assert f("], "it cannot be read"),
        (["assert f(" + "(" * 5000 + ")" * 5000 + ") == 1"], "it cannot be read"),
        (["assert f(1) == " + "-" * 90_000 + "1"], "it cannot be read"),
        (["assert f() == " + "[" * 3000 + "]" * 3000], "it cannot be read"),
        (["assert " + "x" * 100_001], "has over 100000 characters"),
        ([{"input": "", "output": ""}] * 1001, "1001 cases; 1000 at most"),
        ([{"input": "a\ud800", "output": ""}], "input 1 has half a character at 1, '\\ud800'"),
        ('{"inputs": ["a"], "outputs": [["\\ud800"]]}', "output 1 has half a character at 0"),
        ([{"input": "", "output": ""}, "assert f() == 1"], "case 2 is an assert and case 1 is an"),
        (
            [{"input": "1", "output": "1"}, {"input": [1], "output": 1, "fn_name": "f"}],
            "case 2 is a call by fn_name and case 1 is an input and output; send cases of one kind",
        ),
        ('{"inputs": [[1]], "outputs": [%s], "fn_name": "f"}' % ("9" * 5000), "limit (4300"),
        (["assert f() == " + "9" * 5000], "it cannot be read"),
    ],
)
def test_what_is_no_form_of_cases_is_named(expected: object, problem: str) -> None:
    with pytest.raises(BadCases) as refused:
        read_cases(expected)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    "expected",
    [
        ["assert f(1) == 2"] * 1001,
        "\n\n".join(["assert f(1) == 2"] * 1001),
        {"inputs": [[1]] * 1001, "outputs": [7] * 1001, "fn_name": "no name"},
        [{}] * 1001,
    ],
)
def test_too_many_cases_are_refused_before_any_is_read(
    expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ast, "parse", lambda text: pytest.fail(f"{text!r} is read"))
    with pytest.raises(BadCases, match="1001 cases; 1000 at most"):
        read_cases(expected)


DOCSTRING = 'def f(x):\n    """So:\n```\nf(1)\n```\n    """\n    return x\n'


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("print(1)", "print(1)"),
        ("a\n```\nx\n```\nb\n```python\nprint(1)\n```\nend", "print(1)\n"),
        ("it is\n```py\nprint(1)\nprint(2)", "print(1)\nprint(2)\n"),
        ("```\nx\n```\n```", "x\n"),
        ("```\nx\n```\n```\n```", "x\n"),
        ("```\r\nx\r\n```\r\nend", "x\r\n"),
        ("1. so:\n   ```python\n   if x:\n     y\n\n   z\n   ```\n2. end", "if x:\n  y\n\nz\n"),
        ("- so:\n\t```\n\tif x:\n\t\ty\n\t```", "if x:\n\ty\n"),
        ("~~~python\nx = '```'\n```\n~~~\nend", "x = '```'\n```\n"),
        ("````\n```\nx\n```\n````", "```\nx\n```\n"),
        (
            "```\ndef f():\n    '''\n    ```\n    '''\n```\nend",
            "def f():\n    '''\n    ```\n    '''\n",
        ),
        (f"```python\n{DOCSTRING}```\nend", DOCSTRING),
        (DOCSTRING, DOCSTRING),
        ('an odd """ here\n```\nx\n```\nend', "x\n"),
        ('```\nx = \'"""\'\n```\nend', 'x = \'"""\'\n'),
        ("so:\n```python print(1)```\n", "print(1)\n"),
        ("so: ```print(1)``` and\n``` print(2) ```", "print(2)\n"),
        ("```\nx\n```\nIt prints\n```5```", "x\n"),
        ("```\nx = '\x0c \x85 \u2028'\n```", "x = '\x0c \x85 \u2028'\n"),
    ],
)
def test_the_program_is_the_last_fenced_block_or_all_of_the_answer(
    answer: str, program: str
) -> None:
    assert program_of(answer) == program


@pytest.mark.parametrize(
    ("expected", "gave", "right"),
    [
        ("1 2\n3\n", "1 2  \r\n3", True),
        ("1 2", "1  2\n\n", True),
        ("", "\n", True),
        ("1\n2", "1 2", False),
        ("1\n\n2", "1\n2", False),
        ("\n 1\n2", "1\n2", True),
        ("1\n2", "\n\n 1\n2", True),
        ("1 2\n3 4", "1 2\n3", False),
        ("1 2", "1 2 3", False),
        ("1 2 3", "1 2", False),
        ("yes", "YES", False),
        ("0.5", "0.50000001", True),
        ("0.5", "0.501", False),
        ("1e3", "1000", True),
        ("1.0", "1", True),
        ("1000000", "1000000.0", True),
        ("3", "3e0", True),
        ("3", "+3", True),
        ("3", "3.0000000001", False),
        ("12345678901234567890", "12345678901234567891.0", False),
        ("12345678901234567890", "12345678901234567890.0", True),
        ("007", "7", False),
        ("7", "007", True),
        ("3", "3e99999999", False),
        ("3", "3_0", False),
        ("10.5", "1_0.5", False),
        ("10.5", "\u0661\u0660.5", False),
        ("0.5", "0.5" + "0" * 300, True),
        ("0.5", "0.5" + "0" * 500, False),  # no float has so many digits
        ("0.5", "nan", False),
        ("0.5", "half", False),
        ("x.y", "x.z", False),
    ],
)
def test_lines_and_words_of_what_is_printed_are_compared(
    expected: str, gave: str, *, right: bool
) -> None:
    assert is_answer(StdinCase("", expected), gave.encode(), 1e-6) == right


def written(value: object) -> bytes:
    return json.dumps(program_cases._written(value)).encode()


@pytest.mark.parametrize(
    ("expected", "result", "right"),
    [
        ([1, 2], (1, 2), True),
        ([[1, 2]], [1, 2], True),  # APPS and TACO put a list around a result
        ([[1, 2]], [[1, 2]], True),
        ({"1": [2]}, {1: (2,)}, True),
        ([0.5], 0.5000000001, True),
        ([1], True, True),
        (["1"], 1, False),
        ([1], {1}, False),
        ([None], None, True),
        ([1, 2], [1], False),
        ([object.__name__], object(), False),
        ([3], 3.0, True),
        ([0.5], Fraction(1, 2), False),
    ],
)
def test_results_of_calls_are_compared_as_json(
    expected: object, result: object, *, right: bool
) -> None:
    assert is_answer(CallCase("f", (), expected, wrapped=True), written(result), 1e-6) == right


@pytest.mark.parametrize(
    ("expected", "result", "right"),
    [
        ((1, [2]), (1, [2]), True),
        ((1, 2), [1, 2], False),
        ({3, 1, (2, 0)}, {(2, 0), 1.0, 3}, True),
        ({1, 2}, {1}, False),
        ({1: {"a": 0.5}}, {True: {"a": 0.5}}, True),
        (0.1 + 0.2, 0.3, False),
        (set(), set(), True),
        ({"list": [1]}, [1], False),
        ([], {"list": []}, False),
    ],
)
def test_results_of_asserts_are_compared_as_python_does(
    expected: object, result: object, *, right: bool
) -> None:
    assert (expected == result) == right
    assert is_answer(AssertCase("f()", expected), written(result), 1e-6) == right


@pytest.mark.parametrize(
    "gave",
    [
        b"",
        b"\xff\xfe",
        b"[" * 1_000_000,
        b'{"list":' * 100_000,
        b"9" * 10_000,
        b"1e999",
        b'{"set": [%s]}' % b",".join(b"%d" % (n * (2**61 - 1)) for n in range(100_000)),
        b'{"dict": [%s]}' % b",".join(b"[%d, 1]" % (n * (2**61 - 1)) for n in range(100_000)),
        b'{"dict": [[1]]}',
        b'{"dict": {"1": 2}}',
        b'{"list": 7}',
        b'{"other": ["int"]}',
    ],
)
@pytest.mark.timeout(60)  # hashes that collide would cost minutes
def test_a_result_that_is_made_to_hurt_is_wrong(gave: bytes) -> None:
    for expected in (1, {1: 1}, {1}, [1], (0.5,)):
        assert not is_answer(AssertCase("f()", expected), gave, 1e-6)
        assert not is_answer(CallCase("f", (), expected, wrapped=True), gave, 1e-6)


_MANY = 1 << 16


@pytest.mark.parametrize(
    ("case", "gave"),
    [
        (StdinCase("", "1\n2"), b"\n" * _MANY + b"x"),
        (StdinCase("", "1\n2"), b"x" + b"\n" * _MANY + b"x"),
        (StdinCase("", "1\n2"), b"1\n2" + b" 3" * _MANY),
        (StdinCase("", "1 2\n" * _MANY + "y"), b"1  2\n" * _MANY + b"x"),
        (CallCase("f", (), 1), b"[" + b"[]," * _MANY + b"[]]"),
        (AssertCase("f()", {1: [2]}), b'{"list": [' + b"{}," * _MANY + b"{}]}"),
        (AssertCase("f()", {1, 2}), b'{"set": [' + b"1," * _MANY + b"2]}"),
    ],
)
def test_an_output_is_walked_and_never_taken_apart(case: Case, gave: bytes) -> None:
    """Taken apart, it has some sixty bytes for each of its own."""
    tracemalloc.start()
    try:
        assert not is_answer(case, gave, 1e-6)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * len(gave) + 100_000


@pytest.mark.parametrize(
    "value",
    [
        *("\U0001f600" * 1000, "\x00" * 1000, 10**400, -(10**4299), 1e308, True, None),
        *([[]] * 1000, {(1, 2): {3.5: "x"}}, {"\u00e9"}, frozenset({(1,)}), [1e-300] * 50),
    ],
)
def test_a_result_that_is_right_is_not_too_long(value: object) -> None:
    assert is_answer(AssertCase("f()", value), written(value), 1e-6)
    assert is_answer(CallCase("f", (), 1e308), written(10**308), 1e-6)
