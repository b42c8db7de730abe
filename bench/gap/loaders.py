"""Runs inside the engine, through SGLang's own hook for custom loaders of its tensor update.

``load_tensors`` hands tensors in shared memory to the model's loader, which is what the stock call
does once it has unpacked its request. ``load_image`` copies a whole image of the parameters over
them, the fast path of systems that keep complete rank images in RAM; its first call writes the
image. The one tensor that either is given names the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

TENSORS, IMAGE = "bench.gap.loaders.load_tensors", "bench.gap.loaders.load_image"
Named = Iterable[tuple[str, torch.Tensor]]


def load_tensors(model: Any, named: Named) -> None:  # noqa: ANN401  # a model of SGLang
    """Every tensor of a file in shared memory, through the model's own loader."""
    with safe_open(_path(named), framework="pt") as file:
        model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118


def load_image(model: torch.nn.Module, named: Named) -> None:
    """Copy the image over the parameters, or write it."""
    path = _path(named)
    flats = [one.detach().view(-1).view(torch.uint8) for one in model.parameters()]
    size = sum(flat.numel() for flat in flats)
    new = not path.exists()
    image = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    first = 0
    for flat in flats:
        part = image[first : first + flat.numel()]
        first += flat.numel()
        if new:
            part.copy_(flat)
        else:
            flat.copy_(part)


def _path(named: Named) -> Path:
    ((_, text),) = named
    return Path(bytes(text.tolist()).decode())
