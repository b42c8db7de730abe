"""``python -m rose_trainer.synthetic``: the real Publisher without a training, for fault tests.

Publishes the versions of ``rose_weights.send.synthetic``. Reads steps from standard input, one a
line, and says on standard output what became of each, one JSON object a line: ``opened``,
``taken``, ``durable`` or ``failed``. Ends with its input.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading

import torch

from rose_core.identity import WeightVersion
from rose_trainer.errors import TrainerLibraryError
from rose_trainer.publisher import Publisher
from rose_weights.send import synthetic
from rose_wire import faults


def main(argv: list[str] | None = None) -> int:
    """Publish until the input ends.

    Returns:
        0 ended as asked, 1 the run is no longer ours.
    """
    flags = argparse.ArgumentParser(prog="rose_trainer.synthetic", description=__doc__)
    flags.add_argument("--address", required=True, help="host:port of the store")
    flags.add_argument("--run", default="torture")
    flags.add_argument("--on-base", action="store_true", help="send blocks coded on their base too")
    flags.add_argument("--patience-seconds", type=float, default=60.0)
    arguments = flags.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    faults.arm()
    torch.set_num_threads(1)
    try:
        _publish(arguments)
    except TrainerLibraryError as error:
        _print(failed=str(error))
        return 1
    return 0


def _publish(arguments: argparse.Namespace) -> None:
    publisher = Publisher(
        arguments.address,
        arguments.run,
        on_base=arguments.on_base,
        name="synthetic",
        patience_seconds=arguments.patience_seconds,
    )
    _print(opened=publisher.incarnation)
    for line in sys.stdin:
        step = int(line)
        tensors = {
            spec.name: torch.from_numpy(bits.view("i2")).view(torch.bfloat16).view(spec.shape)
            for spec, bits in zip(synthetic.SPECS, synthetic.state_at(step).values(), strict=True)
        }
        version = publisher.publish(step, tensors)
        _print(taken=str(version), step=step)
        threading.Thread(target=_follow, args=(publisher, version), daemon=True).start()
    publisher.close(drain=False)


def _follow(publisher: Publisher, version: WeightVersion) -> None:
    try:
        done = publisher.wait(version)
    except TrainerLibraryError as error:
        _print(failed=f"{error}: {error.__cause__}")
        return
    _print(durable=str(version), step=done.step, digest=done.digest)


def _print(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
