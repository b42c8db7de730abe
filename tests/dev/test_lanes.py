"""A lane imports what names its marker, and runs what needs the node with GPUs together."""

from __future__ import annotations

import gc

import pytest

from rose_dev.lanes import given, names, refused, wanted

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("expression", "markers"),
    [
        ("cluster", ("cluster",)),
        ("engine and not cluster", ("engine",)),
        ("not engine and not cluster", ()),
        ("engine or cluster", ()),
        ("not (engine and cluster)", ()),
        ("slow", ()),
        ("", ()),
    ],
)
def test_a_marker_is_wanted_when_no_test_without_it_can_run(
    expression: str, markers: tuple[str, ...]
) -> None:
    assert wanted(expression) == markers


@pytest.mark.parametrize(
    ("expression", "markers"),
    [
        ("not engine and not cluster", ("engine", "cluster")),
        ("cluster and node and not long", ("long",)),
        ("not engine or cluster", ()),
        ("not (engine and cluster)", ()),
    ],
)
def test_a_marker_is_refused_when_no_test_with_it_can_run(
    expression: str, markers: tuple[str, ...]
) -> None:
    assert refused(expression) == markers


CONFTEST = 'pytest_plugins = ["rose_dev.lanes"]\n'
INI = "[pytest]\nmarkers =\n    cluster: c\n    engine: e\n    node: n\n"


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer to import than these runs last."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(pytester: pytest.Pytester, *flags: str, **files: str) -> pytest.RunResult:
    names.cache_clear()
    given.cache_clear()
    pytester.makeconftest(CONFTEST)
    pytester.makeini(INI)
    pytester.makepyfile(**files)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *flags)


MARKED = "import pytest\n@pytest.mark.cluster\ndef test_a(): pass\ndef test_b(): pass\n"
BROKEN = "raise SystemError('nobody asked for this file')\n"


def test_a_file_that_does_not_name_the_marker_is_not_imported(pytester: pytest.Pytester) -> None:
    found = run(pytester, "-m", "cluster", test_marked=MARKED, test_other=BROKEN)
    found.assert_outcomes(passed=1, deselected=1)
    run(pytester, test_other=BROKEN).assert_outcomes(errors=1)


@pytest.mark.parametrize(
    "marks",
    ["pytest.mark.engine", "[\n    pytest.mark.slow,\n    pytest.mark.engine,\n]"],
)
def test_a_file_whose_every_test_has_a_refused_marker_is_not_imported(
    pytester: pytest.Pytester, marks: str
) -> None:
    refusing, text = ("-m", "not engine and not cluster"), f"import pytest\npytestmark = {marks}\n"
    found = run(pytester, *refusing, test_all=text + BROKEN, test_marked=MARKED)
    found.assert_outcomes(passed=1, deselected=1)
    run(pytester, "-m", "engine", test_all=text + BROKEN).assert_outcomes(errors=1)


def test_a_marker_that_a_file_has_without_naming_it_is_refused(pytester: pytest.Pytester) -> None:
    hidden = "from marks import mine\n@mine\ndef test_a(): pass\n"
    pytester.makepyfile(marks="import pytest\nmine = getattr(pytest.mark, 'cluster')\n")
    pytester.syspathinsert()
    found = run(pytester, test_hidden=hidden)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["*test_hidden.py: name the marker cluster*"])


def test_what_needs_gpus_comes_first_then_what_ends_the_node_and_a_second_node_last(
    pytester: pytest.Pytester,
) -> None:
    of = "node_session"
    fixtures = {of: "", "node": of, "ending_session": of, "second_session": of, "gpu_session": of}
    made = (f"@pytest.fixture\ndef {name}({of}): pass\n" for name, of in fixtures.items())
    pytester.makepyfile(shared="import pytest\n" + "".join(made))
    pytester.syspathinsert()
    tests = {
        "test_1": "def test_a(): pass\n",
        "test_2": "def test_b(): pass\ndef test_c(gpu_session): pass\n",
        "test_3": "def test_d(node, second_session): pass\n",
        "test_4": "def test_e(node): pass\n",
        "test_5": "def test_f(ending_session): pass\n",
    }
    shared = {name: f"from shared import *\n{text}" for name, text in tests.items()}
    found = run(pytester, "-v", **shared)
    found.stdout.fnmatch_lines([f"*::test_{name} *" for name in "bcfaed"])
    run(pytester, "-m", "node", **shared).assert_outcomes(passed=4, deselected=2)


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")])
def test_what_was_tried_again_is_written_down_once(
    pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    once = "seen = []\ndef test_a():\n    seen.append(1)\n    assert len(seen) > 1\n"
    text = f"{once}def test_b(): pass\n"
    again = (*workers, "-p", "pytest_rerunfailures", "--reruns=1", "--write-reruns=out/again")
    run(pytester, *again, test_1=text)
    run(pytester, *again, test_1="def test_b(): pass\n")
    run(pytester, *again, test_1=text.replace("test_a", "test_c"))
    assert (pytester.path / "out/again").read_text() == "test_1.py::test_a\ntest_1.py::test_c\n"


def test_what_was_collected_is_looked_at_by_no_search_for_garbage(
    request: pytest.FixtureRequest,
) -> None:
    assert gc.isenabled()
    assert gc.is_tracked(request.node)
    assert all(one is not request.node for one in gc.get_objects())
