"""The benchmark's own parts: what it counts, and how it reports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.record import figure, record, table
from bench.weights import example, launches, links, memory
from bench.weights.generator import Adam, to_bf16
from bench.weights.ours import Chain, wire_bytes
from bench.weights.peers import PEERS
from bench.weights.plane import RECEIVERS, scratch


def test_a_figure_knows_whether_its_aim_was_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = [
        figure("size", 1.3, "B", at_most=1.4),
        figure("speed", 1.0, "GB/s", at_least=2.0),
        figure("plain", 3.0, ""),
    ]
    assert [one.met for one in figures] == [True, False, None]
    assert "NOT MET" in table(figures)
    record("example", figures, notes=["a note"], folder=tmp_path)
    written = json.loads((tmp_path / "example.json").read_text())
    assert written["figures"][1]["aim"] == ">= 2"
    assert written["machine"]["cores"] >= 1
    assert "note: a note" in capsys.readouterr().out


def test_rounding_is_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.0], np.float32)
    assert [hex(bits) for bits in to_bf16(values)] == ["0x3f80", "0x3f80", "0x3f82", "0xc040"]


def test_the_optimizer_moves_every_element_by_about_its_rate() -> None:
    updates = Adam.warm(1, 10_000).update()
    assert 0.05 < float(np.abs(updates).mean()) < 1.0


def test_layouts_and_ours_are_counted_on_the_same_delta() -> None:
    random = np.random.default_rng(0)
    old = to_bf16(random.normal(0, 0.02, 256 * 1024).astype(np.float32))
    new = old.copy()
    new[random.random(len(new)) < 0.02] += 1
    chain = Chain([old, new], (256, 1024))
    delta = chain.manifests[1]
    sizes = {name: peer(old, new) / delta.changes for name, peer in PEERS.items()}
    assert sizes["row+column int32, bf16"] == 10
    assert sizes["int32+bf16 (verl, vLLM)"] == 6
    assert wire_bytes(delta) / delta.changes < min(sizes.values())
    assert wire_bytes(delta) > delta.block_bytes + len(delta.encode())
    assert np.array_equal(chain.apply(delta, old), new)


def test_the_examples_own_deltas_are_coded_by_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "WARM", 1)
    monkeypatch.setattr(example, "MEASURED", 1)
    sizes = example.measure()
    assert 0 < sizes.density < 1
    assert max(sizes.ours) < min(sizes.peers.values())
    assert sizes.peers["int32+bf16 (verl, vLLM)"] == 6


@pytest.mark.skipif(not links.available(), reason="needs root, ip and tc")
def test_every_namespace_is_limited_reachable_and_gone_afterwards() -> None:
    prefix = f"rosetest{os.getpid()}"
    with links.network(prefix) as names:
        assert len(names) == 2 + RECEIVERS
        for number, rate in ((0, "1Mbit"), (1, "10Mbit"), (9, "1Mbit")):
            shown = subprocess.run(
                ["tc", "-n", names[number], "qdisc", "show", "dev", "eth0"],
                check=True,
                capture_output=True,
                text=True,
            )
            assert f"rate {rate}" in shown.stdout
        exchange = (
            "import socket; s = socket.create_server(('10.77.0.1', 7)); "
            "s.settimeout(20); print('up', flush=True); print(s.accept()[0].recv(5))"
        )
        listening = subprocess.Popen(
            ["ip", "netns", "exec", names[0], sys.executable, "-c", exchange],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert listening.stdout is not None
        assert listening.stdout.readline() == "up\n"
        call = "import socket; socket.create_connection(('10.77.0.1', 7), 20).sendall(b'hello')"
        subprocess.run(["ip", "netns", "exec", names[9], sys.executable, "-c", call], check=True)
        assert listening.stdout.readline() == "b'hello'\n"
        listening.stdout.close()
        assert listening.wait(20) == 0
    left = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    assert prefix not in left.stdout


def test_a_publisher_holds_what_its_page_says_and_no_copy_more() -> None:
    with scratch() as folder:
        held = memory.publisher_bytes(folder)
    assert held.model * memory.BUFFERS < held.grown < held.stated + held.model / 2
    assert held.blocks < held.model


def test_a_commit_asks_a_gpu_for_as_much_whatever_the_number_of_tensors() -> None:
    few, many = (launches.Model("m", layers, 128, 2, 1, 128, 4, 512) for layers in (1, 40))
    (before, after), (more, same) = (launches.count(one, 0.01) for one in (few, many))
    assert (after.launches, after.waits, after.pageable) == (1, 1, 0)
    assert (same.launches, same.waits, same.pageable) == (1, 1, 0)
    # Put in, taken out, compared and reduced; positions and bits twice, and the answer.
    tensors = sum(1 for _ in many.shapes())
    assert (more.launches, more.waits, more.pageable) == (4 * tensors, 2 * tensors, 5 * tensors)
    assert before.launches < more.launches
    changes = sum(one.new.size for one, _ in launches.staged_of(many, 0.01))
    assert same.read >= 6 * changes
    assert more.copied == 20 * changes + tensors
