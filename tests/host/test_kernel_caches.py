"""Compiled kernels: baked ones are found, own ones are kept, nobody else's are reached."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_agent.host.users import kernel_caches
from rose_agent.host.users.accounts import Account, Accounts
from rose_engines.node.rundir import RunDir

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="giving users needs root")
FIRST = 42_500


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Root of the private folders, and what is baked."""
    baked = tmp_path / "baked"
    (baked / "sglang/jit").mkdir(parents=True)
    (baked / "sglang/jit/gemm.so").write_bytes(b"kernel")
    (baked / "sglang/jit/.ninja_log").write_text("# ninja log v5\n")
    (baked / "sglang/jit/build.lock").touch()
    (baked / "triton/KEY").mkdir(parents=True)
    (baked / "triton/KEY/own.cubin").write_bytes(b"kernel")
    listed = {"child_paths": {"own.cubin": "/elsewhere/triton/KEY/own.cubin"}}
    (baked / "triton/KEY/__grp__own.json").write_text(json.dumps(listed))
    return tmp_path / "scratch" / "host" / "made-by", baked


def test_an_engine_begins_with_what_is_baked_and_writes_beside_it(
    places: tuple[Path, Path],
) -> None:
    root, baked = places
    folder = kernel_caches.open_for("slot-1", FIRST, root, baked)
    kernel, log = folder / "sglang/jit/gemm.so", folder / "sglang/jit/.ninja_log"
    assert kernel.read_bytes() == b"kernel"
    assert kernel.is_symlink()
    assert not log.is_symlink()
    assert not (folder / "sglang/jit/build.lock").exists()
    log.write_text("more")
    kernel.unlink()
    kernel.write_bytes(b"own")
    assert (baked / "sglang/jit/gemm.so").read_bytes() == b"kernel"
    assert (baked / "sglang/jit/.ninja_log").read_text().startswith("# ninja")


def test_what_it_compiled_is_there_for_the_slots_next_engine_whoever_that_is(
    places: tuple[Path, Path],
) -> None:
    root, baked = places
    folder = kernel_caches.open_for("slot-1", FIRST, root, baked)
    (folder / "triton/own.cubin").write_bytes(b"own")
    kernel_caches.close("slot-1", root)
    again = kernel_caches.open_for("slot-1", FIRST + 7, root, baked)
    assert (again / "triton/own.cubin").read_bytes() == b"own"
    assert {path.lstat().st_uid for path in again.rglob("*")} == {FIRST + 7}


def test_tritons_lists_name_the_files_of_the_slots_own_folder(places: tuple[Path, Path]) -> None:
    """It takes none of a kernel's files where its list names one that is not there."""
    root, baked = places
    (baked / "triton/KEY/__grp__broken.json").write_text("no list")
    folder = kernel_caches.open_for("slot-1", FIRST, root, baked)
    listed = json.loads((folder / "triton/KEY/__grp__own.json").read_text())["child_paths"]
    assert listed == {"own.cubin": str(folder / "triton/KEY/own.cubin")}
    assert (folder / "triton/KEY/own.cubin").read_bytes() == b"kernel"
    assert (folder / "triton/KEY/__grp__broken.json").read_text() == "no list"


def test_what_another_image_or_driver_made_is_neither_used_nor_kept(
    places: tuple[Path, Path],
) -> None:
    root, baked = places
    first = kernel_caches.open_for("slot-1", FIRST, root, baked)
    (first / "triton/own.cubin").write_bytes(b"own")
    kernel_caches.close("slot-1", root)
    other = root.with_name("another")
    kernel_caches.prune(["slot-1"], other)
    again = kernel_caches.open_for("slot-1", FIRST, other, baked)
    assert not (again / "triton/own.cubin").exists()
    assert [folder.name for folder in root.parent.iterdir()] == ["another"]


@pytest.mark.parametrize("form", ["dist-info", "egg-info"])
def test_a_package_of_another_version_makes_a_difference(tmp_path: Path, form: str) -> None:
    python, packages = tmp_path / "python", tmp_path / "packages"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found = []
    for version in ("1", "2"):
        about = packages / (f"some-{version}.dist-info" if form == "dist-info" else "some.egg-info")
        about.mkdir(parents=True, exist_ok=True)
        named = "METADATA" if form == "dist-info" else "PKG-INFO"
        (about / named).write_text(f"Metadata-Version: 2.1\nName: some\nVersion: {version}\n")
        found.append(kernel_caches.made_by(python, None, tmp_path / "baked"))
        if form == "dist-info":
            shutil.rmtree(about)
    assert kernel_caches.UNKNOWN not in found
    assert found[0] != found[1]


def test_packages_what_is_baked_and_driver_make_a_difference(tmp_path: Path) -> None:
    python, other = Path(sys.executable), tmp_path / "python"
    other.write_text("#!/bin/sh\necho 3.12 sglang==0\n")
    other.chmod(0o755)
    found = [
        kernel_caches.made_by(python, "580.1", tmp_path),
        kernel_caches.made_by(python, "590.1", tmp_path),
        kernel_caches.made_by(other, "580.1", tmp_path),
        kernel_caches.made_by(python, None, tmp_path),
        kernel_caches.made_by(tmp_path / "none", None, tmp_path),
    ]
    assert found.pop() == kernel_caches.UNKNOWN
    assert kernel_caches.made_by(python, "580.1", tmp_path) == found[0]
    (tmp_path / "baked.json").write_text("{}")
    found.append(kernel_caches.made_by(python, "580.1", tmp_path))
    # Copied in beside what the build compiled, as the page advises: no manifest counts it.
    (copied := tmp_path / "deep-gemm" / "cache").mkdir(parents=True)
    (copied / "kernel.cubin").write_bytes(b"kernel")
    found.append(kernel_caches.made_by(python, "580.1", tmp_path))
    (copied / "kernel.cubin").write_bytes(b"another")
    found.append(kernel_caches.made_by(python, "580.1", tmp_path))
    assert len(set(found)) == len(found)
    assert all(kernel_caches.MADE_BY.fullmatch(one) for one in found)


@pytest.mark.parametrize("words", ["exit 3", "exec sleep 1000"])
def test_a_python_that_does_not_say_its_packages_costs_no_slot_its_kernels(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """Another key would be another image's, of which nothing is kept."""
    monkeypatch.setattr(kernel_caches, "_SECONDS", 1.0)
    root, baked = places
    kept = kernel_caches.open_for("slot-1", FIRST, root, baked) / "triton/own.cubin"
    kept.write_bytes(b"own")
    kernel_caches.close("slot-1", root)
    python = root.parents[2] / "python"
    python.write_text(f"#!/bin/sh\n{words}\n")
    python.chmod(0o755)
    unsure = root.with_name(kernel_caches.made_by(python, "580.1", baked))
    for _ in range(2):  # of an image that nobody knows: not used again either
        kernel_caches.prune(["slot-1"], unsure)
        made = kernel_caches.open_for("slot-1", FIRST, unsure, baked)
        assert (made / "sglang/jit/gemm.so").read_bytes() == b"kernel"
        assert not (made / "triton/own.cubin").exists()
        (made / "triton/own.cubin").write_bytes(b"unknown")
        kernel_caches.close("slot-1", unsure)
    assert kept.read_bytes() == b"own"
    kernel_caches.prune(["slot-1"], root)
    assert [folder.name for folder in root.parent.iterdir()] == [root.name]
    assert kept.read_bytes() == b"own"


def test_between_two_engines_and_beside_another_nobody_enters_it(
    places: tuple[Path, Path],
) -> None:
    root, baked = places
    folder = kernel_caches.open_for("slot-1", FIRST, root, baked)
    assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (FIRST, 0o700)
    kernel_caches.close("slot-1", root)
    assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (0, 0o700)


def test_a_link_in_it_gives_nothing_else_away(places: tuple[Path, Path], tmp_path: Path) -> None:
    root, baked = places
    folder = kernel_caches.open_for("slot-1", FIRST, root, baked)
    secret = tmp_path / "secret"
    secret.touch()
    (folder / "link").symlink_to(secret)
    (folder / "folder").symlink_to(tmp_path)
    kernel_caches.open_for("slot-1", FIRST + 1, root, baked)
    assert secret.stat().st_uid == 0


def test_the_folders_of_slots_that_are_gone_are_removed(places: tuple[Path, Path]) -> None:
    root, baked = places
    for slot in ("old", "new"):
        kernel_caches.open_for(slot, FIRST, root, baked)
    kernel_caches.prune(["new"], root)
    assert [folder.name for folder in root.iterdir()] == ["new"]


def test_a_root_that_somebody_else_made_is_refused(places: tuple[Path, Path]) -> None:
    root, baked = places
    root.mkdir(parents=True)
    os.chown(root, FIRST, FIRST)
    with pytest.raises(PermissionError, match="not the engine host's"):
        kernel_caches.open_for("slot-1", FIRST, root, baked)


@pytest.fixture
def node() -> Iterator[RunDir]:
    with tempfile.TemporaryDirectory(prefix="rose", dir="/tmp") as folder:
        yield RunDir(Path(folder)).create()


def test_an_account_has_a_name_and_every_cache_in_its_own_folder(node: RunDir) -> None:
    """Without a name getpass.getuser fails, without the folders every start compiles anew."""
    accounts, slot = Accounts(FIRST, "5" * 16), node.slot("slot-1").create()
    account = accounts.take(slot)
    made = account.environment
    assert made["USER"] == made["LOGNAME"] == f"rose-engine-{FIRST}"
    assert account.kernels is not None
    assert {made[name].startswith(str(account.kernels)) for name in kernel_caches.FOLDERS} == {True}
    (account.kernels / "mark").touch()
    accounts.release(slot)
    again = accounts.take(slot)
    assert again.kernels == account.kernels
    assert (account.kernels / "mark").exists()
    accounts.release(slot)


def test_two_slots_share_no_folder(node: RunDir) -> None:
    accounts = Accounts(FIRST)
    first, second = (accounts.take(node.slot(name).create()) for name in ("a", "b"))
    assert first.kernels is not None
    assert second.kernels is not None
    assert first.kernels != second.kernels
    for name in ("a", "b"):
        accounts.release(node.slot(name))


def test_an_engine_of_the_hosts_own_user_has_the_hosts_caches() -> None:
    assert Account().environment == {}
