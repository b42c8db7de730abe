"""The chart on a node with eight GPUs and beside one without: found and lent in every mode."""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from rose_dev import image
from rose_dev.cluster.second_node import SecondNode
from rose_dev.shell import run
from tests.chart.installation import SYSTEM
from tests.gpu_node.lending import MARKS, USUAL, Lending

pytestmark = MARKS

KUBECTL_ROSE = Path(sys.executable).with_name("kubectl-rose")
MODEL_IMAGE = "localhost/model-tiny:1"


def test_the_default_finds_the_gpus_and_lends_those_that_pods_were_given(
    installed: Lending,
) -> None:
    assert "which found RuntimeClass" in installed.notes
    installed.wait(lambda: installed.found() == "Found", "the guard finds its GPUs")
    installed.serve(**USUAL)
    installed.wait_for_all()
    slots = {name: gpus for name, (_, gpus) in installed.slots().items()}
    assert slots.keys() == {pod.name for pod in installed.pods}
    for pod in installed.pods:
        (gpu,) = slots[pod.name]  # a slot has one GPU, however many its replica has
        assert gpu in pod.gpus
    assert sorted(len(pod.gpus) for pod in installed.pods) == [1, 1, 1, 1, 1, 2]


def engine_host_sees_all(lending: Lending) -> None:
    """The devices of a container come from its mode, those of serving from the device plugin."""
    where = ("daemonset/rose-engine-host", f"--namespace={SYSTEM}", "--container=engine-host")
    listed = lending.node.kubectl("exec", *where, "--", "ls", "/dev").split()
    assert {f"nvidia{index}" for index in range(8)} <= set(listed)


@pytest.fixture
def cpu_node(installed: Lending) -> Iterator[SecondNode]:
    """A node without GPUs beside the first, for what every node runs and nothing else."""
    second = installed.node.second()
    second.up(gpus=0)
    try:
        installed.node.kubectl("cordon", second.name)
        yield second
    finally:
        second.down()


def test_nri_lends_and_on_a_node_without_gpus_the_guard_is_idle_and_ready(
    lending: Lending, cpu_node: SecondNode
) -> None:
    """``helm --wait`` lets one pod of a DaemonSet be missing, so each is looked at."""
    lending.install("--set=gpus.access=NRI", "--set=gpus.nodes=Any")
    lending.wait(lambda: lending.found() == "Found", "the guard finds its GPUs by NRI")
    lending.wait(lambda: lending.found(cpu_node.name) == "NoGpu", "the other has none")
    lending.wait_for_all()
    for component in ("agent", "engine-host"):
        lending.wait(partial(ready_on_both, lending, component), f"both pods of {component}")


def ready_on_both(lending: Lending, component: str) -> bool:
    which = (f"daemonset/rose-{component}", f"--namespace={SYSTEM}")
    path = "--output=jsonpath={.status.numberReady}"
    return lending.node.kubectl("get", *which, path).strip() == "2"


def models(lending: Lending) -> dict[str, str]:
    """Digest of each model that ``kubectl rose models`` shows on the node, by name."""
    kubeconfig = f"--kubeconfig={lending.node.kubeconfig}"
    output = run(
        [KUBECTL_ROSE, "models", kubeconfig, "-A", "--output=json"], seconds=60, check=False
    )
    rows = json.loads(output.stdout)
    return {row["model"]: row["digest"] for row in rows if row["nodes"] == "1 of 1"}


def model_image(model: Path, folder: Path) -> Path:
    """An archive of an image that holds the model at its root, and again below ``model``."""
    layer, archive = folder / "layer.tar", folder / "image.tar"
    with tarfile.open(layer, "w") as out:
        out.add(model, arcname="model")
        for file in model.iterdir():
            out.add(file, arcname=file.name)
    image.write_archive(archive, MODEL_IMAGE, [layer], {})
    return archive


@pytest.fixture(scope="module")
def mounted(installed: Lending, tmp_path_factory: pytest.TempPathFactory) -> str:
    """GPUs by CDI and models from an image: one upgrade for both. The digest of before."""
    installed.wait(lambda: set(models(installed)) == {"tiny"}, "the folder's model is shown")
    (digest,) = models(installed).values()
    folder = tmp_path_factory.mktemp("image")
    installed.node.load(model_image(installed.models / "tiny", folder))
    images = [
        {"name": "tiny", "image": MODEL_IMAGE, "subPath": "model"},
        {"name": "tiny-at-the-root", "image": MODEL_IMAGE},
    ]
    values = folder / "values.yaml"
    values.write_text(yaml.safe_dump({"engineHost": {"modelImages": images}}))
    by_cdi = ("--set=gpus.access=CDI", "--set=gpus.runtimeClassName=nvidia-cdi")
    installed.install(*by_cdi, f"--values={values}")
    return digest


@pytest.mark.usefixtures("mounted")
def test_cdi_lends(lending: Lending) -> None:
    lending.wait(lambda: lending.found() == "Found", "the guard finds its GPUs by CDI")
    lending.wait_for_all()
    engine_host_sees_all(lending)


def test_models_that_the_kubelet_mounts_from_images_are_found_and_lent(
    mounted: str, lending: Lending
) -> None:
    """By a real kubelet and container runtime, at an image's root and below it."""
    wanted = {"tiny": mounted, "tiny-at-the-root": mounted}
    lending.wait(lambda: models(lending) == wanted, "both are shown, with the folder's content")
    where = ("daemonset/rose-engine-host", f"--namespace={SYSTEM}", "--container=engine-host")
    mounts = lending.node.kubectl("exec", *where, "--", "cat", "/proc/self/mounts")
    kept = {line.split()[1]: line.split()[3].split(",") for line in mounts.splitlines()}
    assert {place for place in kept if place.startswith("/models/")} == {
        f"/models/{name}" for name in wanted
    }
    assert all("ro" in kept[f"/models/{name}"] for name in wanted)
    assert str(lending.models) not in kept, "the folder of the node is not there"
    lending.wait_for_all()


def test_dynamic_resource_allocation_lends_by_admin_access(lending: Lending) -> None:
    """The claims are filled by a real scheduler and kubelet; serving's GPUs stay allocated."""
    label = "resource.kubernetes.io/admin-access=true"
    lending.node.kubectl("label", "namespace", SYSTEM, "--overwrite", label)
    lending.install("--set=gpus.access=DRA")
    lending.wait(lambda: lending.found() == "Found", "the guard finds its GPUs by DRA")
    lending.wait_for_all()
    engine_host_sees_all(lending)
    path = "--output=jsonpath={.items[*].status.allocation.devices.results[*].device}"
    given = lending.node.kubectl("get", "resourceclaims", f"--namespace={SYSTEM}", path).split()
    assert sorted(given) == sorted([f"gpu-{index}" for index in range(8)] * 2)
