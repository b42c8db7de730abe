"""Asserts of data sets: what is run, what stays outside, and what is refused.

``FORGED`` is a program that replaces what a test compares with. None of that may earn a case.
"""

from __future__ import annotations

import json

import pytest

from rose_core.rewards.answers import is_answer
from rose_core.rewards.cases import AssertCase, BadCases, Near, read_cases
from rose_rewards import program_cases

# What a model under training may come to write instead of ``f``: equal to all, near to all.
FORGED = """
class X:
  def __eq__(self, other): return True
  def __bool__(self): return True
  def __getattr__(self, name): return X()
  def __call__(self, *a, **k): return True
  def __abs__(self): return 0
  def __float__(self): return 0.0
  __hash__ = None
  __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
  def __sub__(self, other): return 0
  __rsub__ = __add__ = __radd__ = __sub__
  __iter__ = lambda self: iter(())
class math:
  inf = 0
  isclose = lambda *a, **k: True
isclose = all = any = eq = lambda *a, **k: True
abs = lambda value: 0
def f(*a, **k): return X()
"""
RUN = {
    "assert f(1, (2, 3)) == {4: 'a'}": AssertCase("f(1, (2, 3))", {4: "a"}),
    "assert [1] == f(x=2), 'a message'": AssertCase("f(x=2)", [1]),
    "assert (f(*[1, 2])) == -2.5": AssertCase("f(*[1, 2])", -2.5),
    "assert f() is None": AssertCase("f()", None, by_identity=True),
    "assert f(2**3, -1) is False": AssertCase("f(2 ** 3, -1)", expected=False, by_identity=True),
    "assert f(root, math.inf) == True": AssertCase("f(root, math.inf)", expected=True),
    "assert f([Pair(-1, 2)], n=4) == 3": AssertCase("f([Pair(-1, 2)], n=4)", 3),
    "assert f(set((1,)), float('inf')) == 3": AssertCase("f(set((1,)), float('inf'))", 3),
    "assert Solution().f(1) == 2": AssertCase("Solution().f(1)", 2),
    "assert Point(3, 4).norm() == 5": AssertCase("Point(3, 4).norm()", 5),
    "assert f(1)[0] == 2": AssertCase("f(1)[0]", 2),
    "assert f(1).val == 2": AssertCase("f(1).val", 2),
    "assert list(f(1).keys()) == [2]": AssertCase("list(f(1).keys())", [2]),
    "assert sorted(f(1), reverse=True) == [2]": AssertCase("sorted(f(1), reverse=True)", [2]),
    "assert round(f(1), 2) == 2.5": AssertCase("round(f(1), 2)", 2.5),
    "assert decode(encode('a')) == 'a'": AssertCase("decode(encode('a'))", "a"),
    "assert set(f(1)) == set((2, 3))": AssertCase("set(f(1))", {2, 3}),
    "assert f([]) == set()": AssertCase("f([])", set()),
    "assert f([]) == float('-inf')": AssertCase("f([])", float("-inf")),
    "assert math.isclose(f(3), 15.5)": AssertCase("f(3)", 15.5, Near(1e-9, 0.0)),
    "assert isclose(15, f(3), rel_tol=0.1, abs_tol=1)": AssertCase("f(3)", 15, Near(0.1, 1)),
    "assert abs(f(1) - 2) < 1e-6": AssertCase("f(1)", 2, Near(0.0, 1e-6, below=True)),
    "assert 1e-6 >= abs(2.0 - f(1))": AssertCase("f(1)", 2.0, Near(0.0, 1e-6)),
}
QUESTIONS = {
    "assert f(3)": AssertCase("bool(f(3))", expected=True),
    "assert not f([2], x=-1)": AssertCase("bool(f([2], x=-1))", expected=False),
}
REFUSED = [
    "assert f(1) == 2 and f(2) == 3",
    "assert f(1) == 2 or f(2) == 3",
    "assert all(f(i) == i * 7 for i in range(9))",
    "assert all([f(1) == 2])",
    "assert [f(i) for i in (1, 2)] == [2, 3]",
    "assert not f(1) != 2",
    "assert not f(1) == 3",
    "assert not f(1) in (3, 4)",
    "assert f(1) != 3",
    "assert f(1) in (2, 3)",
    "assert f(1) > 2",
    "assert (f(1) == 2) == True",
    "assert (f(1) == 2) is True",
    "assert f(1) == 2 == 2",
    "assert (f(1) == 2, 'm')",
    "assert f(1).__eq__(2)",
    "assert f(1).__eq__(2) == True",
    "assert (lambda: f(1) == 2)()",
    "assert True if f(1) == 2 else False",
    "assert eq(f(1), 2)",
    "assert eq(f(1), 2) == True",
    "assert eq(g(f(1)), 2) == True",
    "assert f(1).equals(2) == True",
    "assert [f(1)].count(2) == 1",
    "assert {2: 'right'}[f(1)] == 'right'",
    "assert {2: 'right'}.get(f(1)) == 'right'",
    "assert f(1) - 2 == 0",
    "assert abs(f(1) - 2) == 0",
    "assert abs(f(1) - 2 == 0) == 1",
    "assert zero(F(1) - 2) == True",
    "assert -f(1)",
    "assert math.isclose(f(1), f(2))",
    "assert math.isclose(f(1), 2) == True",
    "assert not math.isclose(f(1), 2)",
    "assert math.isclose(f(1), 2, rel_tol=g())",
    "assert math.isclose(f(1), 2, abs_tol=-1)",
    "assert math.isclose(f(1), 2, 0.1)",
    "assert math.isclose(f(1) - 2, 0)",
    "assert numpy.allclose(f(1), [2])",
    "assert abs(f(1) - g(1)) < 1",
    "assert abs(f(1) - 2) < g()",
    "assert abs(f(1) - 2) < 1 < 3",
    "assert abs(f(1) - 2) > 1",
    "assert abs(f(1)) < 1",
    "assert isinstance(f(1), int)",
    "assert f(1) == g(2)",
    "assert f(1) == x",
    "assert f(1) is 2",
    "assert 2 == 2",
    "assert list((1, 2)) == [1, 2]",
    "assert f(f'{g(1) == 2}') == 3",
    "assert f(1) == b'x'",
    "assert f(1) == 1j",
    "assert f(1) == [1, {2: b'x'}]",
    "assert f(1) == 0x" + "f" * 4000,
    "assert f",
    "assert True",
]


def written(case: AssertCase, program: str) -> bytes:
    """What the sandbox says of a case, as the runner inside writes it."""
    space = program_cases._namespace()
    exec(program, space)  # noqa: S102  # of this file
    return json.dumps(program_cases._written(eval(case.given, space))).encode()  # noqa: S307  # likewise


def the_case(line: str) -> AssertCase:
    (case,) = read_cases([line])
    assert isinstance(case, AssertCase)
    return case


@pytest.mark.parametrize("line", [*RUN, *QUESTIONS])
def test_a_result_comes_out_and_a_literal_stays(line: str) -> None:
    assert the_case(line) == (RUN | QUESTIONS)[line]


@pytest.mark.parametrize("line", [line for line in RUN if "f(" in line and "code" not in line])
def test_what_replaces_the_comparison_earns_nothing(line: str) -> None:
    case = the_case(line)
    program = FORGED + "root = None\nclass Pair:\n  def __init__(self, *a): pass\n"
    program += "class Solution:\n  f = f\n"
    try:
        gave = written(case, program)
    except TypeError:  # an X is no list: the program crashes
        return
    assert not is_answer(case, gave, 1e-6)


@pytest.mark.parametrize("line", REFUSED)
def test_what_would_be_decided_inside_is_refused_by_its_line(line: str) -> None:
    with pytest.raises(BadCases) as refused:
        read_cases(["assert f(1) == 1", line])
    assert f"case 2, {line!r:.120}: " in str(refused.value)
    assert "must stay outside" in str(refused.value)


@pytest.mark.parametrize(
    ("line", "gave", "right"),
    [
        ("assert f() is True", "true", True),
        ("assert f() is True", "1", False),
        ("assert f() == True", "1", True),
        ("assert f() is None", "null", True),
        ("assert math.isclose(f(3), 15.588457268119894, rel_tol=0.001)", "15.59", True),
        ("assert math.isclose(f(3), 15.588457268119894, rel_tol=0.001)", "15.7", False),
        ("assert math.isclose(f(3), 15.588457268119894)", "15.588457268", True),
        ("assert math.isclose(f(3), 15.588457268119894)", "15.5884572", False),
        ("assert abs(f(3) - 2) < 1", "2.5", True),
        ("assert abs(f(3) - 2) < 1", "3", False),
        ("assert abs(f(3) - 2) <= 1", "3", True),
        ("assert abs(f(3) - 2) <= 1", "NaN", False),
        ("assert abs(f(3) - 2) <= 1", '{"list": [2]}', False),
        ("assert abs(f(3) - 2) <= 1", '"2"', False),
        ("assert abs(f(3) - 2.5) <= 1", "9" * 400, False),
        ("assert f() == float('inf')", "Infinity", True),
        ("assert f()", "true", True),
        ("assert not f()", "true", False),
    ],
)
def test_distances_and_identity_are_decided_outside(line: str, gave: str, *, right: bool) -> None:
    assert is_answer(the_case(line), gave.encode(), 1e-6) == right
