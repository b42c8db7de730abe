"""``python -m rose_cli.sbom``: the bill of materials of the environment it runs in, as CycloneDX.

The images write it to ``/opt/rose/sbom.json``. Only what is installed is listed, nothing is asked
of the network; the hash is that of a distribution's own record of its files. Next step:
``rose_dev.release`` signs it as a statement about the image.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import sys
from typing import Any

_NOTHING = hashlib.sha256(b"").hexdigest()


def document() -> dict[str, Any]:
    """Every installed Python distribution, and Python itself."""
    found = {item.name.lower(): item for item in importlib.metadata.distributions()}
    interpreter = {"type": "application", "name": "python", "version": platform.python_version()}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": _component(importlib.metadata.distribution("rose-gpu"))},
        "components": [
            interpreter,
            *(_component(found[name]) for name in sorted(found) if name != "rose-gpu"),
        ],
    }


def _component(distribution: importlib.metadata.Distribution) -> dict[str, Any]:
    name, version = distribution.name.lower(), distribution.version
    record = (distribution.read_text("RECORD") or "").encode()
    digest = hashlib.sha256(record).hexdigest()
    return {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name.replace('_', '-')}@{version}",
        "licenses": [{"license": {"name": licence}} for licence in _licences(distribution)],
        "hashes": [{"alg": "SHA-256", "content": digest}] if digest != _NOTHING else [],
    }


def _licences(distribution: importlib.metadata.Distribution) -> list[str]:
    """What the distribution says of its licence: expression, else classifiers, else one line."""
    metadata = distribution.metadata
    if expression := metadata.get_all("License-Expression"):
        return expression
    classified = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License :: ")
    ]
    free = "\n".join(metadata.get_all("License") or []).strip().splitlines()
    return classified or free[:1]


if __name__ == "__main__":
    json.dump(document(), sys.stdout, indent=1)
