"""What a plugin needs in an engine of others: whether functions are there, and a word on leaving.

Next step: ``sglang.plugin`` and ``vllm.plugin`` hook them; the two ``launch`` start no engine
without its plugin.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Iterable

from rose_engines.process.launch import PERMIT_VARIABLE, SOCKET_VARIABLE


def exists(target: str) -> bool:
    """Whether this build of the engine has the function."""
    owner, _, name = target.rpartition(".")
    try:
        return callable(getattr(pkgutil.resolve_name(owner), name, None))
    except (ImportError, AttributeError):
        return False


def require(targets: Iterable[str], engine: str, supported: str) -> None:
    """End the process where a function is missing that the plugin needs.

    Raises:
        SystemExit: ordinary exceptions are swallowed where engines load plugins, and it would go on
            without a permit.
    """
    for target in targets:
        if not exists(target):
            refuse(f"this {engine} has no {target}; the plugin supports {supported}")
            raise SystemExit(3)


def check_loaded(loaded: bool, engine: str) -> None:
    """End a launcher whose engine has not loaded the plugin: it could not be stopped.

    Args:
        loaded: it has.
        engine: its name.

    Raises:
        SystemExit: it has not, and the environment names a permit or a control socket.
    """
    if not loaded and any(map(os.environ.get, (PERMIT_VARIABLE, SOCKET_VARIABLE))):
        refuse(f"{engine} did not load ROSE's plugin; the engine is not started")
        raise SystemExit(3)


def refuse(reason: str) -> None:
    """Say why the engine ends, where its starter looks."""
    sys.stderr.write(f"rose: refused: {reason}\n")
    sys.stderr.flush()
