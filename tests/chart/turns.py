"""Turns without a pause, as a trainer sends them, while a test does something to the cluster."""

from __future__ import annotations

import errno
import http.client
import json
import socket
import threading
from urllib.parse import urlsplit

TOKENS = 8
_BODY = json.dumps(
    {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0}}
)


class Turns:
    """Sends one after another; only a call that reached nobody is made again.

    Args:
        url: of the lease's ``/generate``.
        token: of a caller.
        seconds: that a turn may take.

    Attributes:
        failed: what became of every other turn: also one that was sent and then cut off.
    """

    def __init__(self, url: str, token: str, seconds: float = 60.0) -> None:
        at = urlsplit(url)
        self._host, self._port, self._path = at.hostname or "", at.port or 80, at.path
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answered = 0
        self.failed: list[str] = []

    def __enter__(self) -> Turns:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(2 * self._seconds)

    def _run(self) -> None:
        while not self._over.is_set():
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._seconds)
            try:
                connection.connect()
            except OSError as error:
                if not _nobody(error):
                    self.failed.append(f"no connection: {error!r}")
                self._over.wait(0.2)
                continue
            try:
                self._turn(connection)
            except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
                self.failed.append(f"cut off: {error!r}")
            finally:
                connection.close()
            self._over.wait(0.05)

    def _turn(self, connection: http.client.HTTPConnection) -> None:
        connection.request("POST", self._path, _BODY, self._headers)
        answer = connection.getresponse()
        output = answer.read()
        if answer.status != http.client.OK:
            self.failed.append(f"{answer.status}: {output[:300]!r}")
        elif len(json.loads(output)["output_ids"]) != TOKENS:
            self.failed.append(f"a turn of another length: {output[:300]!r}")
        else:
            self.answered += 1


def _nobody(error: OSError) -> bool:
    """Whether no router listens for the moment; a network that swallows calls is something else."""
    gone = isinstance(error, ConnectionRefusedError | socket.gaierror)
    # The address of a pod that has just ended, or its route, is gone.
    return gone or error.errno in {errno.EHOSTUNREACH, errno.ENETUNREACH}
