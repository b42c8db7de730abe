"""``rose advise memory``: what serving's memory setting makes lendable, in GiB, and its price.

Reads the folders of two models (``config.json``, and the safetensors files or their index) and
prints a line for each memory fraction of serving: what may be lent, whether the rollouts' engine
fits, and what serving's KV pool loses. Touches nothing; needs no GPU and no cluster.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rose_core.devices.footprint import MARGIN_BYTES, estimate
from rose_core.devices.memory import GIB, EngineSize, Headroom, in_gib
from rose_core.devices.model_size import (
    CacheShape,
    Unsizable,
    as_block_fp8,
    cache_shape,
    weight_bytes,
)
from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors.safetensors import list_tensors
from rose_simulate.advice.errors import AdviceError
from rose_simulate.advice.memory import (
    Serving,
    ServingEngineKind,
    Setting,
    SettingChange,
    largest,
    settings,
)
from rose_wire.flags import VerbParser, amount, count, share

# As their drivers count them.
CARDS = {"H100": 79.6, "H200": 139.8}
FRACTIONS = (0.88, 0.8, 0.7, 0.6, 0.5)
_INDEX = "model.safetensors.index.json"


def parser() -> argparse.ArgumentParser:
    """Arguments of the verb."""
    made = VerbParser(prog="rose advise memory", description=__doc__)
    add = made.add_argument
    add("--gpu", type=_card, required=True, help=f"{', '.join(CARDS)}, or its memory in GiB")
    add("--serving", type=Path, required=True, metavar="DIR", help="model that serves")
    add("--serving-gpus", type=int, choices=(1, 2, 4, 8), default=1, help="of one replica")
    add("--serving-besides", type=amount, default=3.0, metavar="GiB", help=_BESIDES)
    add(
        "--engine",
        type=ServingEngineKind,
        choices=list(ServingEngineKind),
        default=ServingEngineKind.SGLANG,
        help="that serves",
    )
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


def fp8_weights(folder: Path) -> int | None:
    """Bytes of the model's weights as an FP8 checkpoint; None = it is quantised, or not listed.

    Raises:
        AdviceError: the folder does not say; names the file or field.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        tensors = list_tensors(folder)
        if not tensors or config.get("quantization_config"):
            return None
        return weight_bytes(*as_block_fp8(config, tensors))
    except (OSError, ValueError, UnsupportedEngine) as error:
        raise AdviceError(f"{folder}: its size in FP8 cannot be told: {error}") from error


def serving_of(folder: Path, gpus: int, besides_gib: float, engine: ServingEngineKind) -> Serving:
    """The serving engine on one of its GPUs.

    Raises:
        AdviceError: the folder does not say; names the file or field.
    """
    shape, weights = read_model(folder)
    # MLA keeps one latent for all heads, so every GPU of a replica holds all of it.
    split = 1 if shape.latent else gpus
    return Serving(
        weights // gpus,
        max(1, shape.per_token // split),
        hybrid=bool(shape.state),
        besides=int(besides_gib * GIB),
        engine=engine,
    )


def rollout_of(
    folder: Path,
    kv_tokens: int,
    max_running: int,
    arguments: Mapping[str, str],
    besides_gib: float | None,
) -> EngineSize:
    """An engine of a lease.

    Args:
        folder: of its model.
        kv_tokens: of the lease.
        max_running: turns at a time.
        arguments: of the engine, as the lease gives them.
        besides_gib: as it was measured on a node; None = estimated.

    Raises:
        AdviceError: the folder does not say; names the file or field.
    """
    shape, weights = read_model(folder)
    besides = estimate(arguments, max_running, latent=shape.latent)
    if besides_gib is not None:
        besides = int(besides_gib * GIB) + MARGIN_BYTES
    state = shape.state_bytes(max_running)
    return EngineSize(weights, max(1, shape.per_token), kv_tokens, besides, state=state)


def _phrase(size: EngineSize, *, measured: bool) -> str:
    state = f", states {in_gib(size.state)}" if size.state else ""
    return (
        f"A rollout engine takes {in_gib(size.total)} of one GPU: weights {in_gib(size.weights)}, "
        f"KV {in_gib(size.kv)} for {size.kv_tokens} tokens{state}, "
        f"besides {in_gib(size.fixed)} ({'measured' if measured else 'estimated until measured'})."
    )


def show_changes(found: Sequence[SettingChange], size: EngineSize, *, measured: bool) -> str:
    """What each setting would change, as a table."""
    lines = [
        _phrase(size, measured=measured),
        "",
        f"{'setting':<34} {'lends':<10} {'engine takes':<13} {'fits':<5} the owner gives up",
    ]
    for one in found:
        price = "nothing"
        if one.margin:
            price = f"{in_gib(one.margin)} that are kept free"
        elif one.pool and one.tokens is None:
            price = f"{in_gib(one.pool)} of its KV pool (--serving DIR says how many tokens)"
        elif one.pool:
            price = f"{one.tokens} KV tokens ({in_gib(one.pool)})"
            price += "" if one.starts else "; serving does not start"
        fits = "yes" if one.fits else "no"
        lines.append(
            f"{one.setting or 'as it is':<34} {in_gib(one.lends):<10} {in_gib(one.takes):<13} "
            f"{fits:<5} {price}"
        )
    return "\n".join(lines) + "\n"


def show(options: argparse.Namespace, rows: tuple[Setting, ...], size: EngineSize) -> str:
    """The table and what stands around it."""
    sglang = options.engine is ServingEngineKind.SGLANG
    flag = "--mem-fraction-static" if sglang else "--gpu-memory-utilization"
    lines = [
        _phrase(size, measured=options.rollout_besides is not None),
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
        serving = serving_of(
            options.serving, options.serving_gpus, options.serving_besides, options.engine
        )
        size = rollout_of(
            options.rollout, options.kv_tokens, options.max_running, {}, options.rollout_besides
        )
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
