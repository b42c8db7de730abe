"""``python -m tests.chart.pictures``: the pictures of ``docs/dashboards.md``, from one run.

The chart stands on the development cluster with fake engines, as in the end-to-end test. All the
time that is shown, live requests come in waves, turns go through the lease's router, and a trainer
publishes; a real Prometheus scrapes every page. Then the dashboards are drawn from what it holds.
Needs root (a real node) and what ``make cluster`` has built.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from prometheus_client import start_http_server
from safetensors.torch import load_file

from rose_dev import dashboards
from rose_dev.cluster.node import Node
from rose_dev.dashboards.render import last, picture
from rose_trainer import Publisher
from rose_trainer import metrics as trainer_metrics
from rose_wire.flags import amount
from tests.chart.installation import RESEARCH, SERVING, SYSTEM, field, installation, make_models
from tests.chart.scraping import scraping, targets
from tests.chart.test_end_to_end import callers_token, post, service, wait_for

WAVE_SECONDS, MOST_PER_SECOND = 90.0, 6.0
PUBLISH_SECONDS = 15.0
TURNS = 4
CHANGED_SHARE = 0.01

Stop = threading.Event


def live(node: Node, stop: Stop) -> None:
    """Users of the serving replicas: streams, by day and night of a minute and a half."""
    where = ("pods", f"--namespace={SERVING}", "--output=jsonpath={.items[*].status.podIP}")
    urls = [f"http://{address}:30000/generate" for address in node.kubectl("get", *where).split()]
    with ThreadPoolExecutor(16) as people:
        for number, url in enumerate(itertools.cycle(urls)):
            rate = MOST_PER_SECOND * (1 - math.cos(math.tau * time.time() / WAVE_SECONDS)) / 2
            if stop.wait(1 / max(0.5, rate)):
                return
            people.submit(_quietly, partial(_stream, url, 16 + number % 48))


def _stream(url: str, tokens: int) -> None:
    post(url, max_new_tokens=tokens, stream=True)


def turns(node: Node, stop: Stop) -> None:
    """A trainer's turns through the lease's router, one after the other."""
    url, token = f"http://{service(node)}:8000/generate", callers_token(node)
    while not stop.is_set():
        _quietly(lambda: post(url, max_new_tokens=64, token=token))


def trainer(publisher: Publisher, tensors: dict[str, torch.Tensor], stop: Stop) -> None:
    """A version every ``PUBLISH_SECONDS``, each with a hundredth of the elements changed."""
    random = torch.Generator().manual_seed(1)
    for step in itertools.count(1):
        if stop.wait(PUBLISH_SECONDS):
            return
        for tensor in tensors.values():
            chosen = torch.rand(tensor.shape, generator=random) < CHANGED_SHARE
            tensor[chosen] += 1e-3
        publisher.publish(step, tensors)


def _quietly(work: Callable[[], object]) -> None:
    """Callers of a busy machine try again."""
    with contextlib.suppress(OSError):
        work()


@contextlib.contextmanager
def busy(node: Node, models: Path) -> Iterator[None]:
    """Everybody at work until the block ends."""
    stop = Stop()
    address = field(node, "service", "weights", RESEARCH, "{.spec.clusterIP}")
    tensors = load_file(models / "tiny" / "model.safetensors")
    credential = (models / "team").read_text()
    with Publisher(f"{address}:7446", "grpo", token=credential) as publisher:
        publisher.wait(publisher.publish(0, tensors), 60)
        wait_for(node, "Ready")
        work = [threading.Thread(target=live, args=(node, stop))]
        work += [threading.Thread(target=turns, args=(node, stop)) for _ in range(TURNS)]
        work += [threading.Thread(target=trainer, args=(publisher, tensors, stop))]
        for thread in work:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in work:
                thread.join()


def pages(node: Node) -> dict[str, list[str]]:
    """What Prometheus scrapes: the chart's pods, the store, this process as the trainer."""
    pods = node.kubectl("get", "pods", f"--namespace={SYSTEM}", "--output=json")
    store = field(node, "pods", "--selector=app=weights", RESEARCH, "{.items[0].status.podIP}")
    server, _ = start_http_server(0, "127.0.0.1", registry=trainer_metrics.REGISTRY)
    mine = f"127.0.0.1:{server.server_port}"
    return targets(pods) | {"weights": [f"{store}:9105"], "trainer": [mine]}


def main() -> int:
    """Stand everything up, wait, draw."""
    parser = argparse.ArgumentParser(prog="python -m tests.chart.pictures", description=__doc__)
    parser.add_argument("--minutes", type=amount, default=6.0, help="that the pictures show")
    parser.add_argument("--out", type=Path, default=Path("docs/dashboards"))
    given = parser.parse_args()
    node = Node()
    node.up()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        models = make_models(folder)
        with installation(node, models):
            wait_for(node, "Granted")
            with busy(node, models), scraping(folder, pages(node)) as prometheus:
                time.sleep(given.minutes * 60)
                for board in dashboards.LENDING:
                    drawn = picture(board, last(prometheus.url, given.minutes * 60))
                    (given.out / f"{board.name}.svg").write_text(drawn)
                empty = sorted(prometheus.empty_panels(dashboards.LENDING))
                sys.stdout.write(f"panels without a series: {', '.join(empty) or 'none'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
