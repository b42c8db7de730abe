"""Real engines on the GPU node: stock SGLang on CPU beside serving that holds GPUs, and its turns.

The driver is mounted by ``HostPath``: a container that is given libraries by CDI cannot have the
machine's own folder of libraries over them, which SGLang needs here and not in its own image.
"""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose_agent.os.freezers import HOST_LEAF
from rose_dev import engine_environment
from rose_dev.cluster.gpu_node.driver_root import ROOT
from tests.chart import installation
from tests.chart.installation import RESEARCH, SYSTEM, field, grant_store, tenants_secret
from tests.chart.test_end_to_end import condition, publish, turn
from tests.gpu_node.lending import MARKS, Lending, documents
from tests.gpu_node.machine import apply
from tests.gpu_node.serving_pods import GIB, ServingPod, hold

pytestmark = [*MARKS, pytest.mark.long]
FIT = "DevicesFit"


def values(python: Path) -> dict[str, Any]:
    """Of the chart: the driver by hostPath, MPS too, and engines from this machine."""
    libraries = f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}"
    folders = [str(python.parents[1]), str(python.resolve().parents[1]), libraries]
    paths = [{"path": path, "type": "Directory"} for path in folders]
    return {
        "gpus": {"access": "HostPath", "driverRoot": str(ROOT)},
        "mps": {"enabled": True},
        "storeCredentialSecret": "rose-store-credential",
        "engineHost": {
            "engineClasses": ["sglang-cpu", "sglang"],
            "enginePython": str(python),
            "hostPaths": [*paths, {"path": "/usr/bin/lscpu", "type": "File"}],
            # The engine lies in a cache that perhaps only its owner may read.
            "engines": {"firstUser": 0},
        },
    }


@pytest.fixture(scope="module")
def real(installed: Lending, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lending]:
    """The installation with a host of real engines and a store, beside two replicas."""
    if not engine_environment.is_ready():
        pytest.skip("no engine environment: make engine")
    driver = installed.state.raw.driver_version, installed.state.raw.cuda_version
    # Stock SGLang is built for CUDA 13, which the host does not lend to on an older driver.
    installed.state.raw.driver_version, installed.state.raw.cuda_version = b"580.105.08", 13_000
    installed.serve(chat_1=2)
    node = installed.node
    grant_store(node, installed.models)
    apply(node, *documents(Path(installation.__file__).with_name("cluster.yaml"), "weights"))
    node.kubectl("apply", "--filename=-", stdin=tenants_secret(installed.models))
    huge(installed.models / "huge")
    file = tmp_path_factory.mktemp("values") / "values.json"
    file.write_text(json.dumps(values(engine_environment.engine_python())))
    installed.install(f"--values={file}")
    installed.wait(lambda: installed.found() == "Found", "the guard finds its GPUs by HostPath")
    yield installed
    installed.state.raw.driver_version, installed.state.raw.cuda_version = driver


def huge(folder: Path) -> None:
    """A model of 405B: its shape, and files of its size without content."""
    folder.mkdir()
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "num_hidden_layers": 126,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(shape))
    each = 2 * 16384 * 53248
    tensors = {
        f"model.layers.{layer}.mlp.{name}_proj.weight": {
            "dtype": "BF16",
            "shape": [53248, 16384] if name != "down" else [16384, 53248],
            "data_offsets": [(3 * layer + at) * each, (3 * layer + at + 1) * each],
        }
        for layer in range(126)
        for at, name in enumerate(("gate", "up", "down"))
    }
    header = json.dumps(tensors).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 378 * each)


def ask_for(real: Lending, engine_class: str, model: str) -> None:
    """Have the lease be for one engine of this class; a lease's model cannot be changed."""
    slots = {"min": 1, "max": 1, "idleSeconds": 604800}
    real.renew_lease(engineClass=engine_class, model={"name": model}, slots=slots)


def test_the_mps_daemon_runs_out_of_the_mounted_driver(real: Lending) -> None:
    where = ("daemonset/rose-mps", f"--namespace={SYSTEM}")
    reported = real.node.kubectl("exec", *where, "--", "rose", "mps", "--check", check=False)
    assert "MpsServingOutside" in reported, "a daemon answers, and serving is no client of it"


def test_a_model_that_fits_nowhere_is_said_with_its_size(real: Lending) -> None:
    ask_for(real, "sglang", "huge")
    real.wait(
        lambda: "InsufficientMemory" in granted(real, "reason"), "the lease says why it has no slot"
    )
    figures = r"needs 6\d\d\.\d GiB per GPU with tp=1, the most lendable is 43\.\d GiB on rose-dev;"
    assert re.search(figures, granted(real, "message"))
    real.wait(
        lambda: re.search(f"lease research/grpo: the engine {figures[:-1]}", real.condition(FIT)),
        "the pool's owner reads the same figures",
    )
    real.wait(lambda: real.slots() == {}, "the slot whose host has sized the engine is taken back")


def test_a_driver_too_old_for_the_engine_is_said_with_both_versions(real: Lending) -> None:
    new = real.state.raw.driver_version, real.state.raw.cuda_version
    real.state.raw.driver_version, real.state.raw.cuda_version = b"550.163.01", 12_040
    text = r"CUDA 13\.\d needs driver 580 or later, .*; it is 550\.163\.01"
    real.wait(
        lambda: re.search(text, real.condition("DeviceAccess")), "the pool says what the host lacks"
    )
    real.wait(
        lambda: re.search(rf"False 2 of 2 replicas .*2 DriverTooOld .*{text}", real.condition(FIT)),
        "and that its GPUs do not fit",
    )
    real.state.raw.driver_version, real.state.raw.cuda_version = new
    real.wait(lambda: real.condition("DeviceAccess").startswith("True"), "the new driver is seen")


def granted(real: Lending, field_name: str) -> str:
    path = f'{{.status.conditions[?(@.type=="Granted")].{field_name}}}'
    return field(real.node, "rlease", "grpo", RESEARCH, path)


def test_a_real_engine_beside_serving_answers_turns(real: Lending) -> None:
    ask_for(real, "sglang-cpu", "tiny")
    real.wait(lambda: condition(real.node, "Granted") == "True", "the lease has its slot")
    publish(real.node, real.models)
    real.wait(lambda: condition(real.node, "Ready") == "True", "the engine has the weights")
    assert len(turn(real.node)) == 8
    ((name, (state, gpus)),) = real.slots().items()
    assert state in {"Running", "Stopped"}
    before = lendable(real, name)
    real.state.gpus[gpus[0]].start(engine(real), 8 * GIB)
    (other,) = (pod for pod in real.pods if pod.name != name)
    for _ in range(2):  # the first may fall into a round of readings that had begun before
        grows(real, other)
    assert real.words()[name] == "", "it is known as the slot's by its cgroup"
    assert lendable(real, name) == before, "and its memory is not serving's"


def grows(real: Lending, pod: ServingPod) -> None:
    """Have serving take a GiB more, and the guard see it."""
    room = lendable(real, pod.name)
    hold(real.state, pod, 1)
    real.wait(lambda: lendable(real, pod.name) < room, "the guard has read the GPUs anew")


def lendable(real: Lending, name: str) -> int:
    """Bytes that may be lent beside a pod."""
    return int(real.devices()[name]["lendableBytes"])


def engine(real: Lending) -> int:
    """The pid of one of the rollout engine's processes, in the node's namespace."""
    for entry in (real.node.root() / "proc").iterdir():
        try:
            words, groups = (entry / "cmdline").read_text(), (entry / "cgroup").read_text()
        except OSError:
            continue
        leaves = {line.rpartition("/")[2] for line in groups.splitlines()}
        mine = any(leaf.startswith("rose-") and leaf != HOST_LEAF for leaf in leaves)
        if "sglang" in words and mine:
            return int(entry.name)
    message = "no rollout engine runs on the node"
    raise AssertionError(message)
