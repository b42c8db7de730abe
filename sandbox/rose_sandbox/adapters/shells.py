"""Commands as harnesses give them, as a shell of a sandbox takes them; next: the adapters."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence


def command_of(
    command: str | Sequence[str],
    *,
    folder: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """A command for ``Sandbox.run``; a list is quoted word by word."""
    text = command if isinstance(command, str) else shlex.join(command)
    # ``env`` changes nothing for what comes later in the same shell.
    assignments = [shlex.quote(f"{name}={value}") for name, value in (environment or {}).items()]
    if assignments:
        text = f"env {' '.join(assignments)} sh -c {shlex.quote(text)}"
    return text if folder is None else f"cd {shlex.quote(folder)} && {text}"
