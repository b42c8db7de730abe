"""Waits until the API server's discovery shows ROSE's kinds.

The operator asks discovery once, when it starts; in the seconds after a first installation the
answer may still lack a kind that was just created, and its objects would go unwatched.
"""

import json
import ssl
import sys
import time
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
URL = "https://kubernetes.default.svc/apis"
WANTED = {"servingpools", "rolloutleases", "rolloutslots"}


def ask(path: str) -> str:
    """One answer of the API server."""
    token = (ACCOUNT / "token").read_text()
    request = urllib.request.Request(URL + path, headers={"Authorization": f"Bearer {token}"})  # noqa: S310
    trust = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=5, context=trust) as answer:  # noqa: S310
        text: str = answer.read().decode()
    return text


def known() -> bool:
    """Whether every kind is there."""
    if '"rose-gpu.dev"' not in ask(""):
        return False
    listed = json.loads(ask("/rose-gpu.dev/v1alpha1"))
    return {item["name"] for item in listed["resources"]} >= WANTED


def main() -> int:
    """Ask until the kinds are there, or a minute is over."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if known():
                return 0
            reason = "not all kinds are known yet"
        except OSError as error:
            reason = str(error)
        sys.stdout.write(f"waiting for the kinds: {reason}\n")
        time.sleep(0.5)
    return 1


if __name__ == "__main__":
    sys.exit(main())
