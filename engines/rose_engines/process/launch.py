"""How an engine of either kind is started, as far as both are started alike.

RL teams name engine arguments in their lease. Only those of ``rose_core.api.arguments`` pass;
everything that could load code, open files, change memory sizes, expose admin routes or weaken the
stop stays ROSE's own decision. Next step: ``sglang.arguments`` and ``vllm.arguments`` make a
command line and an environment of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import rose_engines
from rose_core.api.arguments import refusals
from rose_core.identity import BASE_LABEL
from rose_core.rollouts.engines.kv_store import KvPoolSpec
from rose_core.wire.sync import AdapterSpec
from rose_engines.errors import ArgumentRefused

PERMIT_VARIABLE = "ROSE_PERMIT"
SOCKET_VARIABLE = "ROSE_PLUGIN_SOCKET"
# What becomes of cached KV at a commit (``kv``); unset = ``Keep``.
KV_VARIABLE = "ROSE_KV_POLICY"

# Made by the image: a copy of ROSE's packages, and nothing that they need.
OWN_PACKAGES = Path(sys.prefix) / "packages"
# What an engine inherits of its starter's environment: nothing that could hold a secret.
_INHERITED = re.compile(
    r"^(PATH|HOME|LANG|LC_.*|TZ|TMPDIR|LD_LIBRARY_PATH|XDG_CACHE_HOME|CUDA_.*|NVIDIA_.*|NCCL_.*"
    r"|ROSE_LAYOUT_FALLBACK)$"
)


@dataclass(frozen=True)
class Launch:
    """Where and how one engine is started; the platform's part of the decision.

    Attributes:
        python: the engine environment's Python.
        model: model folder (safetensors).
        version: weight label at the start.
        permit: permit file, None = runs without one (serving engines).
        plugin_socket: control socket, None = no plugin.
        device: ``cpu`` or ``cuda``.
        memory_fraction: share of the memory that is free when it loads for weights and pools.
        state_slots: of a hybrid model's state pool; 0 = it has none.
        window_permille: tokens of the pool of sliding windows; 0 = it has none.
        quiet_log: only warnings in the engine's log.
        ranks: devices that one engine is spread over (tensor parallelism).
        kv_policy: ``Keep``, ``Recompute`` or ``Reuse`` (``rose_engines.kv.policy``).
        adapter: the LoRA adapters whose versions it follows, None = those of whole models.
        activity: where it says what it does, before anybody freezes it; None = it does not.
        drafts: it drafts tokens and verifies them.
        kv_store: folder of the keys that the lease's engines share; None = they share none.
        kv_store_bytes: what all of them may keep there together.
        kv_pool: where other nodes' engines have keys of the lease; None = nowhere.
    """

    python: Path
    model: Path
    port: int
    host: str = "127.0.0.1"
    version: str = BASE_LABEL
    permit: Path | None = None
    plugin_socket: Path | None = None
    device: str = "cpu"
    memory_fraction: float = 0.2
    state_slots: int = 0
    window_permille: int = 0
    served_name: str = ""
    quiet_log: bool = False
    ranks: int = 1
    kv_policy: str = "Keep"
    adapter: AdapterSpec | None = None
    activity: Path | None = None
    drafts: bool = False
    kv_store: Path | None = None
    kv_store_bytes: int = 0
    kv_pool: KvPoolSpec | None = None

    @property
    def plugged(self) -> bool:
        """ROSE's plugin runs inside."""
        return self.permit is not None or self.plugin_socket is not None


def check_arguments(arguments: Mapping[str, str]) -> None:
    """Refuse arguments outside the allow-list, whatever the operator has let through.

    Raises:
        ArgumentRefused: names the arguments that may not pass, and why.
    """
    sentences = refusals(arguments)
    if sentences:
        raise ArgumentRefused("; ".join(sentences))


def command_line(launch: Launch, module: str, flags: Mapping[str, str]) -> list[str]:
    """The engine's Python with its module and flags; one without a value is a switch."""
    argv = [str(launch.python), "-m", module]
    for name, value in flags.items():
        argv += [f"--{name}"] if value in {"", "true"} else [f"--{name}", value]
    return argv


def common_environment(
    launch: Launch, inherited: Mapping[str, str], folders: Iterable[Path], threads: int
) -> dict[str, str]:
    """What every engine has, and what tells ROSE's plugin in it where permit and orders are.

    Args:
        launch: how the engine is started.
        inherited: the starter's environment, of which a few names pass.
        folders: in front of the engine's own packages.
        threads: threads of one operation on CPU.
    """
    chosen = {name: value for name, value in inherited.items() if _INHERITED.match(name)} | {
        "PYTHONPATH": ":".join(map(str, folders)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
    }
    if launch.permit is not None:
        chosen[PERMIT_VARIABLE] = str(launch.permit)
    if launch.plugin_socket is not None:
        chosen[SOCKET_VARIABLE] = str(launch.plugin_socket)
        chosen[KV_VARIABLE] = launch.kv_policy
    return chosen


def own_packages() -> tuple[Path, ...]:
    """Folders of ROSE's packages, for an engine's Python.

    ROSE's packages come from the checkout, or from the image's folder of nothing else. A foreign
    site-packages on the path would replace the engine's libraries; so where ROSE is installed in
    one, its copy in ``packages`` beside the environment is taken, and where there is none, the
    engine's environment must have rose-gpu installed itself.
    """
    engines = Path(rose_engines.__file__).resolve().parents[1]
    if engines.name == "engines":
        return (engines, engines.parent)
    if engines.name not in {"site-packages", "dist-packages"}:
        return (engines,)
    return (OWN_PACKAGES,) if (OWN_PACKAGES / "rose_engines").is_dir() else ()
