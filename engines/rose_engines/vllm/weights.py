"""The weights of a running vLLM in canonical coordinates.

The layout is found as with SGLang, by watching the engine's own loader load once more
(``rose_engines.tensors.layout``). vLLM repacks weights and makes tensors of them in a second step,
``process_weights_after_loading``, so that is watched too: a model that would keep something old of
it (MLA's absorbed matrices, packed experts) is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors import layout, parameters
from rose_engines.tensors.canonical import LiveTensor
from rose_engines.tensors.safetensors import read_checkpoint


class Reloaded(torch.nn.Module):
    """A running model, loaded the way in which vLLM loads it: weights, then what is made of them.

    Args:
        model: vLLM's.
        config: its ``ModelConfig``.
        device: where it computes.
    """

    def __init__(self, model: Any, config: Any, device: torch.device) -> None:  # noqa: ANN401
        super().__init__()
        self.model: Any = model
        self._config = config
        self._device = device

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load as ``DefaultModelLoader`` does, processing included."""
        from vllm.model_executor.layers.attention import attention  # noqa: PLC0415
        from vllm.model_executor.model_loader.utils import (  # noqa: PLC0415
            process_weights_after_loading,
        )

        self.model.load_weights(weights)
        # Scales of an unquantised cache are one, whatever the weights are: made anew they would
        # look like something that is made of weights.
        with mock.patch.object(attention, "set_default_quant_scales"):
            process_weights_after_loading(self.model, self._config, self._device)


def read_live(core: Any, runner: Any, folder: Path) -> dict[str, LiveTensor]:  # noqa: ANN401
    """The engine's weights.

    Args:
        core: vLLM's ``EngineCoreProc``.
        runner: its model runner.
        folder: where the layout is kept for the next start.

    Raises:
        UnsupportedEngine: names the tensor whose layout is no permutation, or that is gone.
    """
    config = core.vllm_config.model_config
    model = Reloaded(runner.get_model(), config, runner.device)
    checkpoint = read_checkpoint(Path(config.model))
    named = dict(model.named_parameters())
    _check_kept(named)
    engine = f"vllm {version('vllm')}"
    boxes = layout.derive(model, named, checkpoint, folder / "layout.vllm", engine)
    layout.check_placed(boxes)
    renewals = layout.renewals(model, named)
    return parameters.live_tensors(named, checkpoint, boxes, renewals)


def _check_kept(named: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model whose weights vLLM has thrown away once they were packed.

    Latent attention on a CPU with AMX does so, where no choice of a kernel can be replaced
    (``plugin.keep_weight``); the loader's own words for it would name no tensor.

    Raises:
        UnsupportedEngine: names the first of them.
    """
    gone = sorted(name for name, tensor in named.items() if not tensor.numel())
    if gone:
        message = (
            f"vLLM has packed {gone[0]!r} for this CPU and thrown the weight away, so it cannot be "
            "changed in place"
        )
        raise UnsupportedEngine(message)
