"""The parts of the development cluster that need no cluster."""

import asyncio
import json
import os
import select
import shutil
import subprocess
import sys
import tarfile
from ipaddress import IPv4Interface, IPv4Network
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from rose_dev import image, main, shell
from rose_dev.cluster import build, cgroups, components, node_files, parts, policies
from rose_dev.cluster import place as places
from rose_dev.cluster.components import Layout
from rose_dev.cluster.parts import Part
from rose_dev.cluster.pki import Authority, service_account_keys
from rose_dev.cluster.place import CLUSTERS, FIRST, SECOND, NodeFolders
from rose_dev.errors import BuildFailed, CommandFailed, StartFailed
from rose_dev.waiting import until, wait_until

UPSTREAM = """module k8s.io/kubernetes
require (
	k8s.io/api v0.0.0
	k8s.io/mount-utils v0.0.0
	k8s.io/kube-openapi v0.0.0-20250101000000-abcdef
	k8s.io/utils v0.1.0
)
"""


def layout(folder: Path) -> Layout:
    binaries = {part.name: Path("/bin") / part.name for part in parts.EVERYTHING}
    return Layout(folder, "192.0.2.7", 1, 2, 3, "10.0.0.0/16", binaries)


def place(folder: Path) -> NodeFolders:
    return NodeFolders(folder / "run", folder / "data")


def test_only_modules_without_a_version_are_replaced() -> None:
    text = build.module_file(UPSTREAM, "v1.36.3")
    assert "k8s.io/api => k8s.io/api v0.36.3" in text
    assert "k8s.io/mount-utils => k8s.io/mount-utils v0.36.3" in text
    assert "kube-openapi" not in text
    assert "utils =>" not in text.replace("mount-utils =>", "")


def test_both_version_packages_are_stamped() -> None:
    flags = build.link_flags("v1.36.3")
    assert "-X k8s.io/component-base/version.gitVersion=v1.36.3" in flags
    assert "-X k8s.io/client-go/pkg/version.gitMinor=36" in flags


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildFailed, match=r"no Go compiler.*kwok"):
        build.build([Part("kwok", "example.invalid/kwok", "v1", in_kubernetes=False)])


def test_assets_come_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    part = parts.CONTROL_PLANE[0]
    for folder in (tmp_path, parts.bin_directory()):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / part.name).touch(mode=0o755)
    assert parts.find(part) == tmp_path / part.name
    monkeypatch.delenv("KUBEBUILDER_ASSETS")
    assert parts.find(part) == parts.bin_directory() / part.name


def test_command_lines_agree_about_addresses(tmp_path: Path) -> None:
    made = layout(tmp_path)
    assert made.server == "https://192.0.2.7:1"
    assert "--etcd-servers=http://127.0.0.1:2" in components.api_server(made)
    assert "--listen-client-urls=http://127.0.0.1:2" in components.etcd(made)
    assert "--authorization-mode=Node,RBAC" in components.api_server(made)


def test_pods_have_no_way_out() -> None:
    for seat in (FIRST, SECOND):
        link = json.loads(node_files.cni(seat))["plugins"][0]
        assert link["ipMasq"] is False
        assert "0.0.0.0/0" not in [route["dst"] for route in link["ipam"]["routes"]]
    assert "forward" not in node_files.corefile(FIRST, Path("/pki"))


def test_the_nodes_share_no_address_and_no_folder() -> None:
    nodes = [node for cluster in CLUSTERS for node in cluster]
    firsts = [places.place(number) for number in range(len(CLUSTERS))]
    both = [each for one in firsts for each in (one, one.second())]
    folders = [path for each in both for path in (each.run, each.data)]
    ranges = {seat.ranges for seat in nodes}
    taken = [IPv4Network(seat.pods) for seat in nodes]
    taken += [IPv4Interface(f"{seat.address}/30").network for seat in nodes]
    taken += [IPv4Network(one.services) for one in ranges]
    assert [each.seat for each in both] == nodes
    assert len(ranges) == len(CLUSTERS)
    assert len(set(folders)) == len(folders)
    assert len({seat.cgroup for seat in nodes}) == len({seat.link for seat in nodes}) == len(nodes)
    assert [(a, b) for a, b in combinations(taken, 2) if a.overlaps(b)] == []
    for seat in nodes:
        link = IPv4Interface(f"{seat.address}/30").network
        assert IPv4Interface(f"{seat.gateway}/30").network == link
        assert link.subnet_of(IPv4Network(seat.ranges.links))
        assert IPv4Network(seat.pods).subnet_of(IPv4Network(seat.ranges.pods))


def test_settings_without_which_no_node_comes_up(tmp_path: Path) -> None:
    kubelet = yaml.safe_load(node_files.kubelet(place(tmp_path), tmp_path))
    assert kubelet["failCgroupV1"] is False
    assert kubelet["cgroupDriver"] == "cgroupfs"
    assert "restrict_oom_score_adj = true" in node_files.containerd(place(tmp_path))
    assert yaml.safe_load(node_files.kube_proxy(FIRST, tmp_path))["conntrack"] == {"maxPerCore": 0}


def test_certificates_and_kubeconfig(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    service_account_keys(tmp_path)
    authority.issue("server", "server", hosts=["localhost", "192.0.2.1"])
    authority.issue("admin", "admin", "system:masters")
    written = yaml.safe_load(authority.kubeconfig("admin", "https://192.0.2.1:1").read_text())
    assert written["clusters"][0]["cluster"]["server"] == "https://192.0.2.1:1"
    for name in ("server.key", "admin.key", "sa.key", "admin.conf"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


def fake_hierarchy(root: Path, name: str, state: str) -> Path:
    """A folder that looks like a v1 controller with one frozen child."""
    child = root / name / "rose-dev" / "pod"
    child.mkdir(parents=True)
    for folder in (root / name, root / name / "rose-dev", child):
        (folder / "cgroup.procs").write_text("")
    (child / "freezer.state").write_text(state)
    return child


def test_pods_of_tests_have_more_weight_than_what_computes_beside_the_node(tmp_path: Path) -> None:
    shares = fake_hierarchy(tmp_path, "cpu", "").parent / "cpu.shares"
    shares.write_text("1024\n")
    others = fake_hierarchy(tmp_path, "pids", "").parent
    cgroups.make("rose-dev", tmp_path)
    assert int(shares.read_text()) == 1024
    cgroups.prefer("rose-dev", tmp_path)
    assert int(shares.read_text()) > 1024
    assert not (others / "cpu.shares").exists()


def test_frozen_cgroups_are_found_and_thawed(tmp_path: Path) -> None:
    frozen = fake_hierarchy(tmp_path, "freezer", "FROZEN\n")
    assert cgroups.thaw("rose-dev", tmp_path) == 1
    assert (frozen / "freezer.state").read_text() == "THAWED"
    assert cgroups.thaw("rose-dev", tmp_path) == 0


def test_members_of_every_hierarchy_count(tmp_path: Path) -> None:
    (fake_hierarchy(tmp_path, "cpu", "") / "cgroup.procs").write_text("12\n13\n")
    (fake_hierarchy(tmp_path, "pids", "") / "cgroup.procs").write_text("13\n14\n")
    assert cgroups.members("rose-dev", tmp_path) == {12, 13, 14}
    assert cgroups.members("other", tmp_path) == set()


def test_an_archive_is_what_runtimes_import(tmp_path: Path) -> None:
    layer = tmp_path / "layer.tar"
    with tarfile.open(layer, "w"):
        pass
    target = tmp_path / "image.tar"
    image.write_archive(target, "localhost/x:dev", [layer], {"Entrypoint": ["/x"]})
    with tarfile.open(target) as archive:
        manifest = json.load(archive.extractfile("manifest.json") or pytest.fail("no manifest"))
        names = archive.getnames()
    assert manifest[0]["RepoTags"] == ["localhost/x:dev"]
    assert set(names) == {"manifest.json", manifest[0]["Config"], *manifest[0]["Layers"]}


def test_the_image_holds_every_package_and_no_torch() -> None:
    names = {name.split("/")[0] for _, name in image.code_files(image.checkout())}
    assert {"rose_core", "rose_wire", "rose_operator", "rose_agent", "rose_router"} <= names
    assert not {"rose_dev", "rose_demo"} & names
    with_demo = {name.split("/")[0] for _, name in image.code_files(image.checkout(), image.DEMO)}
    assert with_demo - names == {"rose_demo"}
    needed = image.distributions("rose-gpu", image.EXTRAS)
    assert {"kopf", "kubernetes", "grpcio", "numpy"} <= set(needed)
    assert not {"torch", "transformers", "pytest"} & set(needed)


def test_a_command_that_hangs_is_ended() -> None:
    with pytest.raises(CommandFailed, match="no end after"):
        shell.run(["sleep", "60"], seconds=0.2)


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(CommandFailed, match="exit code 3\nbecause"):
        shell.run(["sh", "-c", "echo because >&2; exit 3"], seconds=20)


def test_waiting_for_what_never_comes_ends_and_names_it() -> None:
    with pytest.raises(StartFailed, match="never: not within"):
        wait_until(lambda: False, "never", seconds=0.05, pause=0.01)


async def test_a_coroutine_that_waits_lets_others_run_and_gives_up_in_time() -> None:
    happened: list[bool] = []
    asyncio.get_running_loop().call_soon(happened.append, True)
    await until(lambda: happened)
    with pytest.raises(TimeoutError):
        await until(lambda: False, seconds=0.02)


def test_without_root_an_existing_cluster_takes_the_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("KUBECONFIG", "/some/kubeconfig")
    assert main.main(["up"]) == 0
    assert "/some/kubeconfig" in capsys.readouterr().out
    monkeypatch.delenv("KUBECONFIG")
    assert main.main(["up"]) == 1
    assert "needs root on Linux" in capsys.readouterr().err


def test_every_component_has_a_known_package() -> None:
    names = [part.name for part in parts.EVERYTHING]
    assert len(names) == len(set(names))
    assert shutil.which("sh"), "the node's processes are started by a shell"


SAVED = """*filter
:FORWARD ACCEPT [1:2]
:KUBE-FORWARD - [0:0]
:KUBE-POD-FW-A - [0:0]
:KUBE-ROUTER-FORWARD - [0:0]
-A FORWARD -m comment --comment "kube-router netpol - A" -j KUBE-ROUTER-FORWARD
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A KUBE-POD-FW-A -j REJECT
-A KUBE-ROUTER-FORWARD -d 10.0.0.2/32 -j KUBE-POD-FW-A
COMMIT
"""


def test_what_enforced_policies_is_forgotten_and_nobody_elses_rules_are_written() -> None:
    assert policies.removal(SAVED).splitlines() == [
        "*filter",
        ":KUBE-POD-FW-A - [0:0]",
        ":KUBE-ROUTER-FORWARD - [0:0]",
        '-D FORWARD -m comment --comment "kube-router netpol - A" -j KUBE-ROUTER-FORWARD',
        "-X KUBE-POD-FW-A",
        "-X KUBE-ROUTER-FORWARD",
        "COMMIT",
    ]


def test_a_command_that_ends_with_us_is_killed_though_nobody_is_left_to_end_it() -> None:
    code = "import subprocess; from rose_dev.shell import ending_with_us; "
    code += "print(subprocess.Popen(ending_with_us(['sleep', '600'])).pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as test:
        assert test.stdout is not None
        pid = int(test.stdout.readline())
        wait_until(
            lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", "it runs", seconds=60
        )
        ended = os.pidfd_open(pid)
        test.kill()
    assert select.select([ended], [], [], 60)[0]
    os.close(ended)
