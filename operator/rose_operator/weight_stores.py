"""The platform's list of weight stores: where nodes dial, and who may follow which runs.

YAML, a line per store, or a mapping where the runs of teams are kept apart::

    main: store.weights.svc:7446
    shared:
      address: tls://store.weights.svc:7446
      runs: {team-a: ["a-*"], team-b: ["b-*", "base"]}

An engine serves whatever run its lease names, so without ``runs`` every namespace that may borrow
can ask the weights of every run of that store for completions. Next step: ``admission`` asks
``may_follow`` of each lease.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rose_operator.errors import ConfigurationError

Runs = Mapping[str, tuple[str, ...]]
"""Namespace -> runs, as shell patterns."""


def may_follow(runs: Runs | None, namespace: str, run: str) -> bool:
    """Whether leases of a namespace may follow a run; None lets everybody follow everything."""
    if runs is None:
        return True
    return any(fnmatch.fnmatchcase(run, pattern) for pattern in runs.get(namespace, ()))


def read(path: Path, entries: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Runs]]:
    """Addresses by store name, and the runs of those stores that keep teams apart.

    Raises:
        ConfigurationError: an entry is neither an address nor an address with runs.
    """
    addresses: dict[str, str] = {}
    runs: dict[str, Runs] = {}
    for name, entry in entries.items():
        where = f"--stores-file {path}: store {name!r}"
        fields = entry if isinstance(entry, dict) else {"address": entry}
        addresses[str(name)] = _address(where, fields.get("address"))
        if unknown := sorted(set(fields) - {"address", "runs"}):
            message = f"{where} has {', '.join(unknown)}; expected address and runs"
            raise ConfigurationError(message)
        if "runs" in fields:
            runs[str(name)] = _runs(where, fields["runs"])
    return addresses, runs


def _address(where: str, found: object) -> str:
    host, _, port = str(found).rpartition(":")
    if not host or not port.isdigit():
        message = f"{where} is {found!r}; expected host:port"
        raise ConfigurationError(message)
    return str(found)


def _runs(where: str, found: object) -> Runs:
    given = found or {}
    if not isinstance(given, dict) or not all(isinstance(one, list) for one in given.values()):
        message = f"{where}: runs is {found!r}; expected NAMESPACE: [RUN, ...]"
        raise ConfigurationError(message)
    return {str(key): tuple(map(str, patterns)) for key, patterns in given.items()}
