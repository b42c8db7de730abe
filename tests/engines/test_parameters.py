"""Where checkpoint tensors lie inside a model: watched while loading, proved by bytes."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from rose_core.delta.digest import digest_run
from rose_core.delta.safetensors import StoredTensor
from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors import parameters
from rose_engines.tensors.canonical import LiveTensor
from rose_engines.tensors.layout import check_placed, derive
from rose_engines.tensors.parameters import DeviceTensor
from rose_engines.tensors.slices import Box
from rose_engines.weights.fused_scatter import StagedScatter, fuse

LAYER = "model.layers.0."


def checkpoint() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = {
        "model.embed_tokens.weight": (10, 4),
        f"{LAYER}self_attn.q_proj.weight": (8, 4),
        f"{LAYER}self_attn.k_proj.weight": (4, 4),
        f"{LAYER}self_attn.v_proj.weight": (4, 4),
        f"{LAYER}self_attn.q_proj.bias": (8,),
        f"{LAYER}self_attn.k_proj.bias": (4,),
        f"{LAYER}self_attn.v_proj.bias": (4,),
        f"{LAYER}mlp.gate_proj.weight": (6, 4),
        f"{LAYER}mlp.up_proj.weight": (6, 4),
        "model.norm.weight": (4,),
    }
    return {
        name: torch.randn(*shape, generator=draw).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def stored(tensors: dict[str, torch.Tensor]) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(
            "BF16",
            tuple(tensor.shape),
            tensor.contiguous().view(torch.int16).numpy().view(np.uint16).ravel(),
        )
        for name, tensor in tensors.items()
    }


STACKED = {
    "q_proj": ("qkv_proj", 0, 8),
    "k_proj": ("qkv_proj", 8, 12),
    "v_proj": ("qkv_proj", 12, 16),
    "gate_proj": ("gate_up_proj", 0, 6),
    "up_proj": ("gate_up_proj", 6, 12),
}


class Model:
    """Fuses and pads as SGLang does at one rank, by copying into parts of its parameters."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        attention, mlp = f"{LAYER}self_attn.", f"{LAYER}mlp."
        kind = torch.bfloat16
        self.parameters = {
            "model.embed_tokens.weight": torch.ones(16, 4, dtype=kind),
            f"{attention}qkv_proj.weight": torch.ones(16, 4, dtype=kind),
            f"{attention}qkv_proj.bias": torch.ones(16, dtype=kind),
            f"{mlp}gate_up_proj.weight": torch.ones(12, 4, dtype=kind),
            "model.norm.weight": torch.ones(4, dtype=kind),
        }
        self.calls = 0
        self.load_weights(tensors.items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.calls += 1
        for name, tensor in weights:
            self.load(name, tensor)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        for part, (fused, first, end) in STACKED.items():
            if f".{part}." in name:
                parameter = self.parameters[name.replace(part, fused)]
                parameter.narrow(0, first, end - first).copy_(tensor)
                return
        if name in self.parameters:
            parameter = self.parameters[name]
            parameter[: len(tensor)].copy_(tensor)
            parameter[len(tensor) :].fill_(0)


def live_tensors(model: Model, checkpoint: dict[str, StoredTensor]) -> dict[str, LiveTensor]:
    layout = derive(model, model.parameters, checkpoint)
    check_placed(layout)
    return parameters.live_tensors(model.parameters, checkpoint, layout)


def test_writes_reach_the_fused_parameter() -> None:
    tensors = checkpoint()
    model = Model(tensors)
    live = live_tensors(model, stored(tensors))
    assert live.keys() == tensors.keys()
    key = live[f"{LAYER}self_attn.k_proj.weight"]
    new = (np.arange(16) + 5).astype(np.uint16)
    key.put(slice(0, 16), new)
    row = model.parameters[f"{LAYER}self_attn.qkv_proj.weight"][8:12].contiguous()
    assert np.array_equal(row.view(torch.int16).numpy().view(np.uint16).ravel(), new)
    where = np.array([3, 9])
    key.put(where, np.array([1, 2], np.uint16))
    assert list(key.take(where)) == [1, 2]
    query = live[f"{LAYER}self_attn.q_proj.weight"]
    assert np.array_equal(query.all_bits(), stored(tensors)[f"{LAYER}self_attn.q_proj.weight"][2])


def test_an_output_matrix_that_is_the_embedding_is_left_out() -> None:
    tensors = checkpoint()
    model = Model(tensors)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert "lm_head.weight" not in live_tensors(model, stored(tensors))
    tensors["lm_head.weight"] += 1
    layout = derive(model, model.parameters, stored(tensors))
    with pytest.raises(UnsupportedEngine, match=r"'lm_head\.weight' nowhere \(1 such"):
        check_placed(layout)


def test_what_was_repacked_after_loading_is_refused_by_name() -> None:
    tensors = checkpoint()
    model = Model(tensors)
    name = f"{LAYER}self_attn.qkv_proj.weight"
    model.parameters[name] = model.parameters[name].flip(0).contiguous()
    with pytest.raises(UnsupportedEngine, match=r"q_proj\.weight.*repacked"):
        live_tensors(model, stored(tensors))


def test_parameter_from_nowhere_is_refused_by_name() -> None:
    tensors = checkpoint()
    model = Model(tensors)
    model.parameters["model.scale"] = torch.ones(3)
    with pytest.raises(UnsupportedEngine, match=r"model\.scale"):
        live_tensors(model, stored(tensors))


def test_padding_must_be_zero() -> None:
    tensors = checkpoint()
    model = Model(tensors)
    model.parameters["model.embed_tokens.weight"][12, 0] = 1.0
    with pytest.raises(UnsupportedEngine, match="more than the checkpoint"):
        live_tensors(model, stored(tensors))


def test_half_a_fused_parameter_is_refused() -> None:
    tensors = checkpoint()
    model = Model(tensors)
    del tensors[f"{LAYER}mlp.up_proj.weight"]
    with pytest.raises(UnsupportedEngine, match="gate_up_proj"):
        live_tensors(model, stored(tensors))


class Odd(Model):
    """A loader that does more than copying with one tensor."""

    def __init__(self, act: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        self.act: Callable[[torch.Tensor, torch.Tensor], object] | None = None
        super().__init__(checkpoint())
        self.act = act

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if self.act is not None and name == "model.norm.weight":
            self.act(self.parameters[name], tensor)
        else:
            super().load(name, tensor)


def fail(*_: object) -> None:
    raise AttributeError("no loader any more")


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda to, tensor: to.copy_(tensor + 1), "computes what it copies into.*norm"),
        (lambda to, tensor: to.copy_(tensor.float()), "computes what it copies"),
        (lambda to, tensor: to.add_(tensor), "computes.*norm.*add_"),
        (lambda to, tensor: to.copy_(tensor.view(torch.int16)), "converts.*norm"),
        (fail, "cannot be called again.*no loader any more"),
    ],
)
def test_a_loader_that_computes_is_refused_by_name_where_it_shall_only_copy(
    act: Callable[[torch.Tensor, torch.Tensor], object], reason: str
) -> None:
    model = Odd(act)
    before = {name: one.clone() for name, one in model.parameters.items()}
    with pytest.raises(UnsupportedEngine, match=reason):
        derive(model, model.parameters, stored(checkpoint()))
    assert all(torch.equal(before[name], one) for name, one in model.parameters.items())


def test_a_loader_that_transposes_is_followed() -> None:
    turned = Odd(lambda to, tensor: to.view(2, 2).copy_(tensor.view(2, 2).t()))
    found = derive(turned, turned.parameters, stored(checkpoint()))
    assert found["model.norm.weight"] == (Box("model.norm.weight", 0, 2, 2, 2, 0, 1, 2),)


def test_a_loader_may_copy_before_it_copies() -> None:
    model = Odd(lambda to, tensor: to.copy_(tensor.clone().contiguous().to("cpu")))
    layout = derive(model, model.parameters, stored(checkpoint()))
    assert layout["model.norm.weight"] == (Box("model.norm.weight", 0, 1, 4, 4, 0, 4),)


def test_the_layout_is_kept_while_nothing_changes(tmp_path: Path) -> None:
    model, kept = Model(checkpoint()), stored(checkpoint())
    first = derive(model, model.parameters, kept, tmp_path / "layout", "1 rank")
    again = derive(model, model.parameters, kept, tmp_path / "layout", "1 rank")
    assert (first, model.calls) == (again, 2)
    derive(model, model.parameters, kept, tmp_path / "layout", "2 ranks")
    assert model.calls == 3
    (tmp_path / "layout").write_bytes(b"torn")
    assert derive(model, model.parameters, kept, tmp_path / "layout", "1 rank") == first


def test_a_layout_that_reaches_outside_is_refused() -> None:
    model, kept = Model(checkpoint()), stored(checkpoint())
    layout = derive(model, model.parameters, kept)
    norm = "model.norm.weight"
    for box in (
        Box(norm, 0, 1, 4, 4, 3, 4),
        Box(norm, 2, 1, 4, 4, 0, 4),
        Box("x", 0, 1, 4, 4, 0, 4),
    ):
        with pytest.raises(UnsupportedEngine, match="does not fit"):
            parameters.live_tensors(model.parameters, kept, {**layout, norm: (box,)})


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, np.uint16), (torch.float32, np.uint32)]
)
def test_device_tensor_moves_bits(dtype: torch.dtype, bits: type[np.generic]) -> None:
    """The accelerator's path, on a CPU tensor: same calls, same bits."""
    data = torch.arange(8).to(dtype)
    signed = torch.int16 if dtype is torch.bfloat16 else torch.int32
    tensor = DeviceTensor("t", "BF16", (8,), data.view(signed))
    new = np.array([60000, 7], bits)
    tensor.put(np.array([2, 5]), new)
    assert tensor.take(np.array([2, 5])).dtype == bits
    assert list(tensor.take(np.array([2, 5]))) == [60000, 7]
    tensor.put(slice(0, 2), np.array([1, 2], bits))
    assert list(tensor.all_bits()[:3]) == [1, 2, 60000]


class Joining(Model):
    """Two checkpoint tensors are put together before they are copied, as MLA's projections are."""

    def __init__(self, tensors: dict[str, torch.Tensor], dim: int) -> None:
        self.dim = dim
        super().__init__(tensors)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        gate, up = (given.pop(f"{LAYER}mlp.{part}_proj.weight") for part in ("gate", "up"))
        super().load_weights(given.items())
        whole = torch.cat([gate, up], self.dim).reshape(12, 4)
        self.parameters[f"{LAYER}mlp.gate_up_proj.weight"].copy_(whole)


def test_tensors_that_are_put_one_below_the_other_are_followed() -> None:
    tensors = checkpoint()
    live = live_tensors(Joining(tensors, 0), stored(tensors))
    apart = live_tensors(Model(tensors), stored(tensors))
    assert live.keys() == apart.keys()
    assert all(np.array_equal(live[name].all_bits(), apart[name].all_bits()) for name in live)


def test_tensors_that_are_put_side_by_side_are_refused() -> None:
    model = Joining(checkpoint(), 1)
    with pytest.raises(UnsupportedEngine, match=r"computes what it copies into .*gate_up_proj"):
        derive(model, model.parameters, stored(checkpoint()))


class Widening(Model):
    """Keeps a norm in 32 bits, as routers of experts and state spaces are kept."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.parameters["model.norm.weight"] = torch.ones(4)
        self.load_weights(tensors.items())


@pytest.mark.parametrize("on", ["host", "device"])
def test_a_weight_that_is_kept_in_32_bits_moves_by_its_own_16(
    on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on == "device":
        monkeypatch.setattr(
            parameters, "storage",
            lambda name, dtype, shape, flat, renewal=None: DeviceTensor(
                name, dtype, shape, flat, *(renewal or ())
            ),
        )  # fmt: skip
    tensors = checkpoint()
    model, kept = Widening(tensors), stored(tensors)
    live, name = live_tensors(model, kept), "model.norm.weight"
    norm = live[name]
    digest = norm.digest()
    assert digest == digest_run(name, 0, kept[name][2])
    new = torch.tensor([1.5, -3.0], dtype=torch.bfloat16)
    bits = new.view(torch.int16).numpy().view(np.uint16)
    where = np.array([1, 3])
    fused = fuse([StagedScatter(name, where, bits, norm.take(where))], live)
    assert (fused is None) == (on == "host")
    if fused is None:
        norm.put(where, bits)
    else:
        assert fused.put() is None
    assert model.parameters[name][where].tolist() == new.tolist()
    assert norm.holds(where, bits)
    assert norm.digest() != digest
    norm.put(slice(0, 4), kept[name][2])
    assert torch.equal(model.parameters[name], tensors[name].float())
    assert norm.digest() == digest


def test_bits_below_those_of_the_checkpoint_are_refused_or_make_the_digest_wrong() -> None:
    tensors = checkpoint()
    model, kept = Widening(tensors), stored(tensors)
    live, name = live_tensors(model, kept), "model.norm.weight"
    digest = live[name].digest()
    model.parameters[name].view(torch.int32)[2] += 1
    assert live[name].digest() != digest
    with pytest.raises(UnsupportedEngine, match="32 bits that are not BF16's"):
        live_tensors(model, kept)
    live[name].put(slice(0, 1), kept[name][2][:1])
    assert live[name].digest() == digest
