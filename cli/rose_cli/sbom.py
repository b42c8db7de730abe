"""``python -m rose_dev.sbom``: the bill of materials of the environment it runs in, as CycloneDX.

The images write it to ``/opt/rose/sbom.json``. Only what is installed is listed, nothing is asked
of the network; the hash is that of a distribution's own record of its files.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

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


def of_chart(folder: Path, version: str, images: dict[str, str]) -> dict[str, Any]:
    """The chart's files with their hashes, and the images that were released with it.

    Args:
        folder: the chart's.
        version: its version.
        images: digest (``sha256:...``) by name with tag.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": folder.name, "version": version}},
        "components": [
            *(_image(name, digest) for name, digest in sorted(images.items())),
            *(
                {
                    "type": "file",
                    "name": str(path.relative_to(folder)),
                    "hashes": [_sha256(hashlib.sha256(path.read_bytes()).hexdigest())],
                }
                for path in files
            ),
        ],
    }


def _image(name: str, digest: str) -> dict[str, Any]:
    repository, _, version = name.rpartition(":")
    short = repository.rpartition("/")[2]
    return {
        "type": "container",
        "name": short,
        "version": version,
        "purl": f"pkg:oci/{short}@{quote(digest, safe='')}"
        f"?repository_url={quote(repository, safe='')}&tag={version}",
        "hashes": [_sha256(digest.removeprefix("sha256:"))],
    }


def _sha256(content: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": content}


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
        "hashes": [_sha256(digest)] if digest != _NOTHING else [],
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
