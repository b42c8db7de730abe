"""A LoRA adapter as a run: which tensors a version has, and what a lease may ask for.

An adapter travels as any model does, tensor by tensor under the names that PEFT gives them, in the
element type of the engine. Two tensors more make its digest say what is computed: over which base,
by the base's own digest, and by which factor the adapter is scaled. Publisher and engine both make
them, so a version for another base is refused before a byte is written.
"""

from __future__ import annotations

BASE = "rose.base"
"""The digest of the base model, low and high lane: two words of 64 bits (``I64``)."""
SCALE = "rose.scale"
"""What the product of the two matrices is multiplied by: one ``F64``."""

STACKS: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""The engine's modules, and the model's that each of them is made of, in order."""

MOST_ADAPTERS = 16
"""Adapters that one engine may hold at a time."""

TARGETS: tuple[str, ...] = tuple(name for parts in STACKS.values() for name in parts)
"""Modules that an adapter may change."""

_PREFIX = "base_model.model."


def tensor_name(module: str, side: str) -> str:
    """PEFT's name of one of the two matrices.

    Args:
        module: path in the model, as ``model.layers.0.self_attn.q_proj``.
        side: ``A`` or ``B``.
    """
    return f"{_PREFIX}{module}.lora_{side}.weight"


def pool_slots(adapters: int) -> int:
    """Slots of SGLang's pool: one an adapter, and one for what is computed without any."""
    return adapters + 1


def engine_name(number: int) -> str:
    """What an engine calls the adapter in one of its slots."""
    return f"rose-{number}"


def run_of(cache_key: str) -> str:
    """The run whose adapter a request is for: routers begin the key with the version.

    Returns:
        Empty when the key names no version.
    """
    label = cache_key.partition("\n")[0].partition("/")[0]
    return label.partition("@")[0] if "@" in label else ""
