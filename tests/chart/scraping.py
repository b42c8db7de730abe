"""A real Prometheus beside the development cluster: scrapes its pods, answers the dashboards."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from rose_dev import prometheus
from rose_dev.dashboards.model import Dashboard, text
from rose_dev.dashboards.render import ask, filled
from rose_dev.waiting import wait_until
from rose_wire.ports import free_port


def targets(*pods: str) -> dict[str, list[str]]:
    """Job -> addresses of pages, from ``kubectl get pods -o json``, as the monitors find them."""
    found: dict[str, list[str]] = {}
    for pod in [one for listed in pods for one in json.loads(listed)["items"]]:
        labels, address = pod["metadata"]["labels"], pod["status"].get("podIP")
        job = labels.get("app.kubernetes.io/name", labels.get("app", ""))
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", []):
                if address and port.get("name", "").endswith("http"):
                    found.setdefault(job, []).append(f"{address}:{port['containerPort']}")
    return found


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):  # noqa: S310
                return True
        except OSError:
            return False

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Series that a query finds now."""
        return ask(self.url, "query", query=filled(query))

    def empty_panels(self, boards: Collection[Dashboard]) -> set[str]:
        """Panels of these dashboards of which no query finds anything."""
        return {
            f"{board.title}: {panel['title']}"
            for board in boards
            for panel in json.loads(text(board))["panels"]
            if panel["type"] != "row"
            and not any(self.ask(target["expr"]) for target in panel["targets"])
        }


@contextmanager
def scraping(folder: Path, jobs: dict[str, list[str]]) -> Iterator[Prometheus]:
    """Run Prometheus on a free port until the block ends."""
    configuration = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": addresses}]}
            for job, addresses in jobs.items()
        ],
    }
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(configuration))
    port = free_port()
    command = [
        str(prometheus.find("prometheus")),
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'series'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        running = Prometheus(port)
        wait_until(running.ready, "Prometheus answers", seconds=60)
        yield running
    finally:
        process.terminate()
        process.wait(30)
