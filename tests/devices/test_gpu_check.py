"""``python -m bench.gpu`` on the stand-ins: what it computes, what it writes, what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from bench.gpu import suite
from bench.gpu.__main__ import main, write
from bench.gpu.aims import AIMS, judged, lines, settings, table_of_aims, verdicts
from bench.gpu.beside import Measured
from bench.gpu.checks import spread, step_ms
from bench.gpu.commits import MODELS, shapes
from bench.gpu.pack import LIGHT, pack, split
from bench.gpu.stepper import KINDS
from bench.gpu.suite import (
    BOUND_SECONDS,
    CHECKS,
    Check,
    apart,
    carry_out,
    chosen,
    rehearsed,
)
from rose_core.guard.chunk import prefill_chunk

ROOT = Path(__file__).parents[2]
# Nothing of these is on a machine that has torch and nvidia-ml-py alone.
ABSENT = (
    "msgspec",
    "zstandard",
    "pydantic",
    "yaml",
    "aiohttp",
    "grpc",
    "psutil",
    "prometheus_client",
    "sglang",
)


def test_steps_are_measured_from_end_to_end_so_that_waiting_counts() -> None:
    steps = [(1_000_000, 900_000), (3_000_000, 900_000), (4_000_000, 900_000)]
    assert step_ms(steps) == {"count": 2, "p50": 1.5, "p99": 2.0, "max": 2.0}
    assert spread([]) == {"count": 0}


def test_a_result_lies_under_its_gpu_and_date(tmp_path: Path) -> None:
    path = write({"date": "2026-01-31", "run": 1, "machine": {"gpu": "NVIDIA H200"}}, tmp_path)
    assert path == tmp_path / "h200" / "2026-01-31-1.json"
    assert json.loads(path.read_text())["date"] == "2026-01-31"


def test_it_needs_nothing_that_a_bare_gpu_machine_lacks() -> None:
    code = f"import sys; sys.modules |= dict.fromkeys({ABSENT!r}); import bench.gpu.__main__, "
    code += "bench.gpu.commits, "
    code += "bench.gpu.worker, rose_agent.devices.mps.fake"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_commits_have_the_tensors_of_the_real_models() -> None:
    assert [sum(1 for _ in shapes(name, tiny=False)) for name in MODELS] == [399, 18_867]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_chunks_are_those_that_rose_gives_an_engine_of_such_a_context() -> None:
    for kind in ("prefill", "prefill_32k"):
        tokens, _, context = KINDS[kind]
        assert tokens == prefill_chunk(context)


@pytest.mark.timeout(900)  # alone a minute; beside other lanes it took five
def test_every_check_of_both_runs_rehearses_without_a_gpu_and_no_figure_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--rehearse", "--results", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "not run" not in output
    assert {aim.name for aim in AIMS if aim.name not in output} == set()
    assert list(tmp_path.iterdir()) == []


def test_a_missed_aim_refutes_its_promise_and_says_what_falls() -> None:
    figures = judged([("commit.8B.as_today", 300.0, "ms"), ("commit.8B.tensors", 399, "count")])
    assert [(one.aim, one.met) for one in figures] == [("<= 50 ms", False), (None, None)]
    reported = verdicts(figures, ["commit"])["useful"]
    assert reported["verdict"] == "refuted"
    assert "0014" in str(reported["missed"])


def test_what_was_not_measured_leaves_a_promise_unknown() -> None:
    assert verdicts([], list(CHECKS))["serving first"]["verdict"] == "unknown"
    assert verdicts([], [])["useful"]["verdict"] == "unknown"
    whole = judged([(aim.name, aim.most, aim.unit) for aim in AIMS])
    assert {one["verdict"] for one in verdicts(whole, list(CHECKS)).values()} == {"kept"}


STORM = "storm.{}.serving_memory_max"


def storm_figures(at_once: float, at_boundary: float, ends: float = 12.3) -> dict[str, str]:
    measured = [
        (STORM.format("freeze"), at_once, "ms"),
        (STORM.format("boundary"), at_boundary, "ms"),
        ("storm.boundary.reached_max", 700.0, "ms"),
        ("stop.decode32.pause.last_kernel_p99", ends, "ms"),
    ]
    return {one.name: one.asks for one in settings(judged(measured))}


def test_the_storm_decides_the_grace_and_says_where_it_stands() -> None:
    assert storm_figures(5.0, 5.0)["Grace.iteration_ns"] == "0 ms"
    waits = storm_figures(190.0, 5.0)
    assert waits["Grace.iteration_ns"] == "13 ms"
    assert waits["Grace.start_ns"] == "2 s"
    # More than the periods leave room for: the step itself has to become shorter.
    assert storm_figures(190.0, 5.0, ends=44.0)["Grace.iteration_ns"].startswith("30 ms, and short")
    hopeless = storm_figures(190.0, 180.0)
    assert "Step.END" in hopeless["next_step"]
    assert "Grace.iteration_ns" not in hopeless


def test_nothing_is_asked_to_be_set_by_what_was_not_measured() -> None:
    assert settings(judged([])) == []


def test_the_place_of_each_constant_has_it() -> None:
    measured = [
        (STORM.format("freeze"), 190.0, "ms"),
        (STORM.format("boundary"), 5.0, "ms"),
        ("storm.boundary.reached_max", 700.0, "ms"),
        ("stop.decode32.pause.last_kernel_p99", 12.3, "ms"),
        ("footprint.context", 0.5, "GiB"),
        ("killed.memory_free", 0.4, "s"),
    ]
    found = settings(judged(measured))
    assert len(found) == 4
    for one in found:
        assert one.name.rpartition(".")[2] in (ROOT / one.place).read_text()
    printed = "\n".join(lines(judged(measured), {}))
    assert "set Grace.iteration_ns (rose_core/guard/freezing.py) to 13 ms; now 20 ms" in printed


def test_every_aim_says_what_would_refute_it_and_the_page_lists_it() -> None:
    rows = table_of_aims(list(CHECKS))
    assert len(rows) == len(AIMS)
    assert all(" refutes (" in row for row in rows)
    page = (ROOT / "docs/gpu-check.md").read_text()
    for aim in AIMS:
        check, *middle, last = aim.name.split(".")
        short = {aim.name, f"{check}.*.{last}", f"{check}.*.{'.'.join(middle[1:])}.{last}"}
        assert any(f"`{name}`" in page for name in short), aim.name


def test_a_check_that_outlives_its_budget_is_ended_with_what_it_has_started() -> None:
    with pytest.raises(OSError, match=r"no end within its 0 s"):
        apart(Check("nvml", "bench.gpu.beside", 0.01, 1))


def test_a_check_apart_gives_what_its_process_printed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "bench" / "gpu"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    code = "import json, sys; print('noise'); print(json.dumps([[sys.argv[1], 1, 'ms']]))"
    (package / "suite.py").write_text(code)
    monkeypatch.setattr(suite, "_ROOT", tmp_path)
    assert apart(CHECKS["nvml"]) == [("nvml", 1.0, "ms")]


def test_a_rehearsal_whose_process_ends_says_how() -> None:
    with rehearsed(["footprint"]) as carry_out, pytest.raises(OSError, match="ended with 1"):
        carry_out(CHECKS["footprint"])  # there is no library of NVML


def test_each_aim_belongs_to_a_check_that_there_is() -> None:
    assert {aim.check for aim in AIMS} <= set(CHECKS)
    assert all(aim.refutes for aim in AIMS)


def test_both_runs_fit_into_their_bound() -> None:
    for run in (1, 2):
        assert sum(one.budget_s for one in CHECKS.values() if one.run == run) <= BOUND_SECONDS < 600


def test_a_check_that_no_longer_fits_is_not_begun_and_one_that_fails_takes_no_other_along() -> None:
    now = [0.0]

    def measure(check: Check) -> Measured:
        now[0] += 100
        if check.name == "footprint":
            raise OSError("no such thing")
        return [(f"{check.name}.x", 1.0, "ms")]

    names = ["nvml", "footprint", "resident", "stop"]
    outcome = carry_out(names, measure, bound_s=400, clock=lambda: now[0])
    assert [name for name, _, _ in outcome.measured] == ["nvml.x", "resident.x"]
    assert set(outcome.not_run) == {"footprint", "stop"}
    assert "do not fit" in outcome.not_run["stop"]


def test_an_unknown_check_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="no check odd; there are nvml"):
        chosen("odd,stop", None)
    assert chosen("stop,nvml", None) == ["nvml", "stop"]
    assert "stop" not in chosen("", 2)


def test_a_pack_is_in_pieces_that_give_the_whole_again(tmp_path: Path) -> None:
    whole = bytes(range(256)) * 1000
    pieces = split([whole[:100_000], whole[100_000:]], tmp_path, piece_bytes=70_000)
    assert [piece.stat().st_size for piece in pieces] == [70_000, 70_000, 70_000, 46_000]
    assert b"".join(piece.read_bytes() for piece in pieces) == whole


def test_a_pack_holds_wheels_code_and_sums(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/torch-1-py3-none-any.whl").write_bytes(b"wheel")
    pieces = pack(tmp_path / "out", tmp_path / "wheels")
    joined = tmp_path / "joined.tar"
    joined.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(joined) as whole:
        names = set(whole.getnames())
    assert {"wheels/torch-1-py3-none-any.whl", "bench/gpu/suite.py"} <= names
    assert "dev/rose_dev/gpu/nvml.c" in names
    assert not [name for name in names if "__pycache__" in name]
    command = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    assert subprocess.run(command, cwd=tmp_path / "out", check=False).returncode == 0
    with pytest.raises(FileExistsError):
        pack(tmp_path / "out", tmp_path / "wheels")


def test_a_light_pack_unpacks_without_a_network_and_its_command_runs(tmp_path: Path) -> None:
    """Wheels are empty stand-ins here; ``make gpu-pack`` downloads the real ones."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in LIGHT:
        _empty_wheel(wheels, name.replace("-", "_"))
    pack(tmp_path / "out", wheels, light=True)
    command = [str(tmp_path / "out/unpack.sh")]
    tools = tmp_path / "tools"
    venv.create(tools, with_pip=True, system_site_packages=False)
    # A machine whose Python has torch and numpy.
    site = next((tools / "lib").glob("python*/site-packages"))
    for name in ("torch", "numpy"):
        (site / name).mkdir()
        (site / name / "__init__.py").touch()
    found = {
        **os.environ,
        "PATH": f"{tools}/bin:{os.environ['PATH']}",
        "PIP_CONFIG_FILE": os.devnull,
    }
    done = subprocess.run(command, env=found, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check = str(tmp_path / "out/gpu-check/check.sh")
    output = subprocess.run(
        [check, "--aims"], env=found, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert output.returncode == 0, output.stderr
    assert output.stdout.count(" refutes (") == len(AIMS)
    again = subprocess.run(command, env=found, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "remove it first" in again.stderr


def _empty_wheel(folder: Path, name: str) -> None:
    about = f"{name}-1.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as made:
        made.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        made.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        made.writestr(f"{about}/RECORD", "")


@pytest.mark.slow
def test_without_a_gpu_every_longer_check_runs_and_no_figure_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--rehearse", "--extra", "--results", str(tmp_path), "--seconds", "0.02"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("a rehearsal")
    assert "not_run" not in output
    mps = json.loads(output.partition("\nmps: ")[2].splitlines()[0])
    shares = mps["shares_ms"]
    assert [one["multiprocessors"] for one in shares] == [28, 40, 66]
    assert all(one["listed"] and one["serving_sees"] == 132 for one in shares)
    assert [one["priority"] for one in mps["priority_ms"]] == [0, 1]
    assert [one["how"] for one in mps["kills"]] == ["terminate_client", "kill"]
    assert mps["fault"]["servers"] == ["FAULT"]
    assert mps["fault"]["new_clients_afterwards"]
    pool = json.loads(output.partition("\nelastic: ")[2].splitlines()[0])
    assert (pool["give_back_s"]["count"], pool["left_after_cycles_bytes"]) == (2, 0)
    weights = json.loads(output.partition("\nweights: ")[2].splitlines()[0])["tiny"]
    assert 0 < weights["changes"] <= weights["state_bytes"] / 2 * 0.01
    published = json.loads(output.partition("\npublishing: ")[2].splitlines()[0])["tiny"]
    for keep_on in ("host", "device"):
        assert 0 < published[keep_on]["changes"] <= published[keep_on]["state_bytes"] / 2 * 0.01
        assert 1 < published[keep_on]["bytes_per_change"] < 2
    staged = json.loads(output.partition("\nstaging: ")[2].splitlines()[0])["tiny"]
    assert 0 < staged["changes"] < staged["stream_bytes"]
    pause = json.loads(output.partition("\ncommit_pause: ")[2].splitlines()[0])["tiny"]
    assert pause["changes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_it_is_an_error_that_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--results", str(tmp_path)]) == 1
    output = capsys.readouterr().err
    assert "needs an NVIDIA GPU" in output
    assert "--rehearse" in output
    assert list(tmp_path.iterdir()) == []
