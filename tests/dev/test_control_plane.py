"""The control plane alone: a real API server that survives its own death."""

import os
from pathlib import Path

import pytest

from rose_dev.cluster.control_plane import ControlPlane
from rose_dev.errors import CommandFailed

pytestmark = pytest.mark.cluster


def test_objects_outlive_the_api_server(control_plane: ControlPlane) -> None:
    control_plane.kubectl("create", "configmap", "outlives", "--from-literal=a=b")
    control_plane.stop_api_server()
    try:
        with pytest.raises(CommandFailed):
            control_plane.kubectl("get", "configmap", "outlives")
    finally:
        control_plane.start_api_server()
    assert control_plane.kubectl("get", "configmap", "outlives", "-o=jsonpath={.data.a}") == "b"


def test_the_version_is_parsable(control_plane: ControlPlane) -> None:
    assert '"gitVersion": "v1.' in control_plane.kubectl("get", "--raw=/version")


def test_its_servers_seldom_search_for_garbage(control_plane: ControlPlane) -> None:
    servers = {one.name: one.process.pid for one in control_plane._children.values()}
    assert {"etcd", "kube-apiserver"} <= servers.keys()
    asked = f"GOGC={os.environ.get('GOGC', '400')}".encode()  # yours comes first
    for pid in servers.values():
        assert asked in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
