"""Device classes: what kind of GPU it is, as one word that people can write in a lease.

The word is the driver's product name, lower case, without the maker, joined by dashes:
``NVIDIA H100 80GB HBM3`` is ``h100-80gb-hbm3``. It says which GPUs are alike and nothing of how
fast they are: that is measured (``rose_core.rollouts.engines.estimates``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_MAKER = "nvidia-"
_OTHER = re.compile(r"[^a-z0-9]+")
_LONGEST = 63
MIXED = "mixed"
"""A replica whose GPUs are of several classes."""


def device_class(product: str) -> str:
    """The class of a GPU by its product name; empty when it has none."""
    slug = _OTHER.sub("-", product.lower()).strip("-")
    return slug.removeprefix(_MAKER)[:_LONGEST].strip("-")


def class_of_all(products: Iterable[str]) -> str:
    """The class of several GPUs that are one replica; empty when one of them is unknown."""
    found = {device_class(product) for product in products}
    if not found or "" in found:
        return ""
    return found.pop() if len(found) == 1 else MIXED
