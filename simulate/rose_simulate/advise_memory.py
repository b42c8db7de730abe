"""``rose advise memory``: what serving's memory setting makes lendable, in GiB, and its price.

Reads the folders of two models (``config.json``, and the safetensors files or their index) and
prints a line for each memory fraction of serving: what may be lent, whether the rollouts' engine
fits, and what serving's KV pool loses. Touches nothing; needs no GPU and no cluster.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rose_core.devices.footprint import MARGIN_BYTES, estimate
from rose_core.devices.memory import GIB, EngineSize, Headroom, in_gib
from rose_core.devices.model_size import CacheShape, Unsizable, cache_shape, weight_bytes
from rose_engines.errors import UnsupportedEngine
from rose_engines.safetensors import list_tensors
from rose_simulate.advice.errors import AdviceError
from rose_simulate.advice.memory import Engine, Serving, Setting, largest, settings
from rose_wire.flags import amount, count, share

# As their drivers count them.
CARDS = {"H100": 79.6, "H200": 139.8}
FRACTIONS = (0.88, 0.8, 0.7, 0.6, 0.5)
_INDEX = "model.safetensors.index.json"


def parser() -> argparse.ArgumentParser:
    """Arguments of the verb."""
    made = argparse.ArgumentParser(prog="rose advise memory", description=__doc__)
    add = made.add_argument
    add("--gpu", type=_card, required=True, help=f"{', '.join(CARDS)}, or its memory in GiB")
    add("--serving", type=Path, required=True, metavar="DIR", help="model that serves")
    add("--serving-gpus", type=int, choices=(1, 2, 4, 8), default=1, help="of one replica")
    add("--serving-besides", type=amount, default=3.0, metavar="GiB", help=_BESIDES)
    add("--engine", type=Engine, choices=list(Engine), default=Engine.SGLANG, help="that serves")
    add("--rollout", type=Path, required=True, metavar="DIR", help="model of the leases")
    add("--kv-tokens", type=count, default=16384, help="of the lease")
    add("--max-running", type=count, default=8, help="of the lease: turns at a time")
    add("--rollout-besides", type=amount, metavar="GiB", help=_MEASURED)
    add("--headroom", type=count, metavar="GiB", help="memoryHeadroomGiB of the pool")
    add("--fraction", type=share, action="append", default=[], help="of serving; may be repeated")
    add("--request-tokens", type=count, default=8192, help="of one request of serving, for scale")
    return made


_BESIDES = "what serving holds besides weights and pool: graphs, activations of a full batch"
_MEASURED = "what an engine of the lease was measured to hold besides; absent = estimated"


def _card(text: str) -> int:
    try:
        return int(CARDS.get(text.upper(), 0.0) * GIB) or int(float(text) * GIB)
    except ValueError:
        known = ", ".join(CARDS)
        raise argparse.ArgumentTypeError(f"{text!r} is neither {known} nor a size in GiB") from None


def read_model(folder: Path) -> tuple[CacheShape, int]:
    """What a model's caches cost, and the bytes of its weights.

    Raises:
        AdviceError: the folder does not say; names the file or field.
    """
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
        if not isinstance(config, dict):
            raise Unsizable("config.json is no object")
        return cache_shape(config), _weights(folder, config)
    except (OSError, ValueError, UnsupportedEngine) as error:
        raise AdviceError(f"{folder}: its size cannot be told: {error}") from error


def _weights(folder: Path, config: dict[str, Any]) -> int:
    tensors = list_tensors(folder)
    if tensors or not (folder / _INDEX).exists():
        return weight_bytes(config, tensors)
    total = json.loads((folder / _INDEX).read_bytes()).get("metadata", {}).get("total_size")
    if not isinstance(total, int) or total <= 0:
        raise Unsizable(f"{_INDEX} has no metadata.total_size")
    return total


def show(options: argparse.Namespace, rows: tuple[Setting, ...], size: EngineSize) -> str:
    """The table and what stands around it."""
    sglang = options.engine is Engine.SGLANG
    flag = "--mem-fraction-static" if sglang else "--gpu-memory-utilization"
    measured = "measured" if options.rollout_besides is not None else "estimated until measured"
    state = f", states {in_gib(size.state)}" if size.state else ""
    lines = [
        f"A rollout engine takes {in_gib(size.total)} of one GPU: weights {in_gib(size.weights)}, "
        f"KV {in_gib(size.kv)} for {size.kv_tokens} tokens{state}, "
        f"besides {in_gib(size.fixed)} ({measured}).",
        "",
        f"{flag:<24} {'lends (first hour)':<24} {'rollout fits':<20} "
        f"{'KV tokens of serving':<28} requests of {options.request_tokens} at once",
    ]
    for one in rows:
        fits = f"yes, {one.rollout_tokens} tokens" if one.fits(size) else "no"
        less = f" ({one.given_up} fewer)" if one.given_up > 0 else ""
        kept = f"{one.tokens}{less}" if one.tokens else "does not start"
        lines.append(
            f"{one.fraction:<24.2f} {f'{in_gib(one.lends)} ({in_gib(one.first_hour)})':<24} "
            f"{fits:<20} {kept:<28} {one.tokens // options.request_tokens}"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """Run the verb.

    Returns:
        0, or 1 when a model cannot be sized or fits nowhere.
    """
    options = parser().parse_args(argv)
    headroom = Headroom(gib=options.headroom)
    try:
        shape, weights = read_model(options.serving)
        # MLA keeps one latent for all heads, so every GPU of a replica holds all of it.
        split = 1 if shape.latent else options.serving_gpus
        serving = Serving(
            weights // options.serving_gpus,
            max(1, shape.per_token // split),
            hybrid=bool(shape.state),
            besides=int(options.serving_besides * GIB),
            engine=options.engine,
        )
        size = _rollout(options)
        fractions = tuple(options.fraction) or FRACTIONS
        rows = settings(options.gpu, serving, size, headroom, fractions)
        sys.stdout.write(show(options, rows, size))
        best = largest(options.gpu, serving, size, headroom)
    except AdviceError as error:
        sys.stderr.write(f"rose advise memory: {error}\n")
        return 1
    kept = in_gib(headroom.kept(options.gpu))
    sys.stdout.write(
        f"\nThe largest fraction at which it fits is {best.fraction:.2f}: {in_gib(best.lends)} are "
        f"lent, serving keeps {best.tokens} KV tokens.\n"
        f"Headroom of {kept} is kept free (memoryHeadroomGiB); each GiB less lends one more.\n"
    )
    return 0


def _rollout(options: argparse.Namespace) -> EngineSize:
    shape, weights = read_model(options.rollout)
    besides = estimate({}, options.max_running, latent=shape.latent)
    if options.rollout_besides is not None:
        besides = int(options.rollout_besides * GIB) + MARGIN_BYTES
    return EngineSize(
        weights,
        max(1, shape.per_token),
        options.kv_tokens,
        besides,
        state=shape.state_bytes(options.max_running),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
