"""Tensors that a loader makes from weights, and loaders that copy in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rose_core.delta.safetensors import StoredTensor
from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors.canonical import Live
from rose_engines.tensors.layout import derive, renewals
from rose_engines.tensors.parameters import live_tensors

NAME = "kv_b_proj.weight"
BITS = np.arange(1, 17, dtype=np.uint16)
CHECKPOINT: dict[str, StoredTensor] = {NAME: StoredTensor("BF16", (4, 4), BITS)}


def _out(table: torch.Tensor, made: torch.Tensor) -> None:
    torch.add(made, 1, out=table)


def _foreach(table: torch.Tensor, made: torch.Tensor) -> None:
    torch._foreach_copy_([table], [made])


WRITERS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "through data": torch.Tensor.copy_,
    "out": _out,
    "foreach": _foreach,
}


class Latent(torch.nn.Module):
    """A model whose loader absorbs a projection, as MLA's does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.kv_b_proj = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.w_kc: torch.Tensor | None = None
        self.table = torch.ones(4, dtype=torch.bfloat16)
        self.register_buffer("scales", torch.ones(4))
        self.absorbed: list[torch.Tensor] = []
        self.method = SimpleNamespace(packed={})
        self.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.post()

    def post(self) -> None:
        if self.kind in {"rebinds", "stays"}:
            self.w_kc = self.kv_b_proj.weight.detach().t().contiguous()
        made = self.kv_b_proj.weight.detach().t().contiguous()
        if self.kind == "writes":
            self.table.add_(1)
        if write := WRITERS.get(self.kind):
            write(self.table.data, made[0])
        if self.kind == "buffer":
            self.scales.copy_(made[0])  # type: ignore[operator]
        if self.kind == "list":
            self.absorbed = [made]
        if self.kind == "element":
            self.absorbed[:] = [made]
        if self.kind == "object":
            self.method.packed["w"] = (made,)
        if self.kind == "layer":
            self.layers[0].packed = made

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, given in weights:
            if self.kind == "pool":
                with ThreadPoolExecutor() as pool:
                    pool.submit(parameters[name].data.copy_, given).result()
            elif self.kind == "thread":
                thread = threading.Thread(target=parameters[name].data.copy_, args=(given,))
                thread.start()
                thread.join()
            elif self.kind == "into out":
                torch.mul(given, 2, out=parameters[name].data)
            elif self.kind == "into foreach":
                torch._foreach_copy_([parameters[name].data], [given])
            else:
                parameters[name].data.copy_(given)
        if self.kind != "stays":
            self.post()


def boxes(kind: str) -> tuple[object, ...]:
    model = Latent(kind)
    return derive(model, dict(model.named_parameters()), CHECKPOINT)[NAME]


def test_a_model_without_such_tensors_is_laid_out() -> None:
    assert len(boxes("plain")) == 1


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("rebinds", "w_kc"),
        ("stays", "w_kc"),
        ("writes", "table"),
        ("through data", "table"),
        ("out", "table"),
        ("foreach", "table"),
        ("buffer", "scales"),
        ("list", "absorbed.0"),
        ("element", "absorbed.0"),
        ("object", "method.packed.w.0"),
        ("layer", "layers.0.packed"),
    ],
)
def test_what_a_loader_makes_from_weights_is_refused_by_its_path(kind: str, path: str) -> None:
    with pytest.raises(UnsupportedEngine, match=f"keeps '{path}', which its loader makes"):
        boxes(kind)


@pytest.mark.parametrize("kind", ["into out", "into foreach"])
def test_a_loader_that_computes_into_a_parameter_is_refused_and_leaves_it(kind: str) -> None:
    model = Latent(kind)
    before = model.kv_b_proj.weight.detach().clone()
    with pytest.raises(UnsupportedEngine, match="loader computes 'kv_b_proj"):
        derive(model, dict(model.named_parameters()), CHECKPOINT)
    assert torch.equal(model.kv_b_proj.weight, before)


@pytest.mark.parametrize("kind", ["rebinds", "list", "element", "object", "layer"])
def test_what_was_there_before_is_put_back(kind: str) -> None:
    """A captured graph reads the old memory."""
    model = Latent(kind)

    def held() -> list[object]:
        parts = [model.w_kc, model.absorbed, *model.absorbed]
        return [*parts, *model.method.packed.values(), getattr(model.layers[0], "packed", None)]

    old = held()
    with pytest.raises(UnsupportedEngine):
        derive(model, dict(model.named_parameters()), CHECKPOINT)
    now = held()
    assert len(now) == len(old)
    assert all(one is other for one, other in zip(now, old, strict=True))


class Shifted(torch.nn.Module):
    """A norm that keeps its weight plus one, as SGLang's ``GemmaRMSNorm`` does."""

    gemma_weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(16, dtype=torch.bfloat16), False)
        self.register_buffer("gemma_weight", torch.ones(16), persistent=False)

    def refresh_gemma_weight(self) -> None:
        self.gemma_weight.copy_(self.weight.data).add_(1)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, given in weights:
            self.weight.data.copy_(given)
        self.refresh_gemma_weight()


def test_what_a_module_can_renew_follows_a_commit_and_its_undo_at_the_same_address() -> None:
    model, bits = Shifted(), np.full(16, 0x3F80, np.uint16)  # 1.0
    checkpoint: dict[str, StoredTensor] = {"weight": StoredTensor("BF16", (16,), bits)}
    model.load_weights([("", torch.ones(16))])
    named, address = dict(model.named_parameters()), model.gemma_weight.data_ptr()
    boxes = derive(model, named, checkpoint)
    live = live_tensors(named, checkpoint, boxes, renewals(model, named))
    where = np.array([3, 5])
    for value, kept in ((0x4000, 3.0), (0x3F80, 2.0)):
        live["weight"].put(where, np.full(2, value, np.uint16))
        assert model.gemma_weight[where].tolist() == [kept, kept]
        assert model.gemma_weight.data_ptr() == address
    assert model.gemma_weight.tolist() == [2.0] * 16


HEADS, NOPE, VALUE, LATENT = 2, 3, 2, 4


class Attention(torch.nn.Module):
    """Latent attention as SGLang keeps it: the halves of ``kv_b_proj`` by head.

    Args:
        how: its loader copies into what is there, or makes other tensors; or computes otherwise.
    """

    qk_nope_head_dim, v_head_dim = NOPE, VALUE

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        rows = HEADS * (NOPE + VALUE)
        self.kv_b_proj = torch.nn.Linear(LATENT, rows, bias=False, dtype=torch.bfloat16)
        self.w_kc: torch.Tensor | None = None
        self.w_vc: torch.Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, given in weights:
            self.kv_b_proj.weight.data.copy_(given)
        whole = self.kv_b_proj.weight.detach().view(HEADS, NOPE + VALUE, LATENT)
        keys = whole[:, :NOPE].contiguous() * (2 if self.how == "scales" else 1)
        values = whole[:, NOPE:].contiguous().transpose(1, 2)
        if self.how == "copies" and self.w_kc is not None and self.w_vc is not None:
            self.w_kc.copy_(keys)
            self.w_vc.copy_(values)
        else:
            self.w_kc, self.w_vc = keys, values


def attention(how: str) -> tuple[Attention, dict[str, StoredTensor]]:
    shape = (HEADS * (NOPE + VALUE), LATENT)
    bits = np.arange(0x3F80, 0x3F80 + shape[0] * LATENT, dtype=np.uint16)
    model = Attention(how)
    given = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).view(shape)
    model.load_weights([("", given)])
    return model, {NAME: StoredTensor("BF16", shape, bits)}


@pytest.mark.parametrize("how", ["copies", "rebinds"])
def test_the_halves_of_latent_attention_follow_a_commit_and_its_undo_at_the_same_address(
    how: str,
) -> None:
    model, checkpoint = attention(how)
    halves = model.w_kc, model.w_vc
    named = dict(model.named_parameters())
    live = live_tensors(named, checkpoint, derive(model, named, checkpoint), renewals(model, named))
    now = model.w_kc, model.w_vc
    assert all(one is other for one, other in zip(now, halves, strict=True))
    before = live[NAME].digest()
    whole = model.kv_b_proj.weight.detach().view(HEADS, NOPE + VALUE, LATENT)
    where = np.array([0, NOPE * LATENT + 1])
    for value in (0x4000, 0x3F80):
        live[NAME].put(where, np.full(2, value, np.uint16))
        assert model.w_kc is not None
        assert model.w_vc is not None
        assert torch.equal(model.w_kc, whole[:, :NOPE])
        assert torch.equal(model.w_vc, whole[:, NOPE:].transpose(1, 2))
    live[NAME].put(where, checkpoint[NAME][2][where])
    assert live[NAME].digest() == before


def test_a_half_that_does_not_follow_makes_the_digest_wrong() -> None:
    model, checkpoint = attention("copies")
    named = dict(model.named_parameters())
    live = live_tensors(named, checkpoint, derive(model, named, checkpoint), renewals(model, named))
    before = live[NAME].digest()
    assert model.w_vc is not None
    model.w_vc[0, 0, 0] = 7.0
    assert live[NAME].digest() != before
    live[NAME].put(slice(0, 1), checkpoint[NAME][2][:1])
    assert live[NAME].digest() == before


def test_halves_that_are_made_in_another_way_are_refused() -> None:
    model, checkpoint = attention("scales")
    with pytest.raises(UnsupportedEngine, match="keeps 'w_kc', which its loader makes"):
        derive(model, dict(model.named_parameters()), checkpoint)


def test_a_half_that_is_old_and_made_anew_elsewhere_is_refused() -> None:
    """A captured graph would go on reading the old one."""
    model, checkpoint = attention("rebinds")
    old = model.w_vc
    assert old is not None
    old[0, 0, 0] = 7.0
    with pytest.raises(UnsupportedEngine, match="keeps 'w_vc', which its loader makes"):
        derive(model, dict(model.named_parameters()), checkpoint)
    assert model.w_vc is old


def laid_out(tmp_path: Path, model: Attention, checkpoint: dict[str, StoredTensor]) -> Live:
    """As a start does that keeps its layout for the next one."""
    named = dict(model.named_parameters())
    found = derive(model, named, checkpoint, tmp_path / "layout", "engine")
    return live_tensors(named, checkpoint, found, renewals(model, named))


def test_a_layout_from_its_file_serves_while_what_is_derived_is_current(tmp_path: Path) -> None:
    model, checkpoint = attention("copies")
    laid_out(tmp_path, model, checkpoint)
    model.load_weights = None  # type: ignore[method-assign,assignment]  # nobody watches it again
    live = laid_out(tmp_path, model, checkpoint)
    live[NAME].put(slice(0, 1), np.full(1, 0x4000, np.uint16))
    assert model.w_kc is not None
    assert float(model.w_kc[0, 0, 0]) == 2.0


@pytest.mark.parametrize("how", ["rebinds", "scales"])
def test_a_layout_from_its_file_does_not_let_pass_what_would_stay_old(
    tmp_path: Path, how: str
) -> None:
    laid_out(tmp_path, *attention("copies"))
    model, checkpoint = attention(how)
    if how == "rebinds":
        assert model.w_kc is not None
        model.w_kc[0, 0, 0] = 7.0
    with pytest.raises(UnsupportedEngine, match="keeps 'w_kc', which its loader makes"):
        laid_out(tmp_path, model, checkpoint)


def test_a_layout_from_its_file_does_not_let_pass_a_scale_of_a_half(tmp_path: Path) -> None:
    laid_out(tmp_path, *attention("copies"))
    model, checkpoint = attention("copies")
    model.w_scale_k = torch.ones(1)
    with pytest.raises(UnsupportedEngine, match="keeps 'w_scale_k', which its loader makes"):
        laid_out(tmp_path, model, checkpoint)


def test_an_old_half_that_the_loader_makes_in_place_is_right_when_it_is_watched_again(
    tmp_path: Path,
) -> None:
    laid_out(tmp_path, *attention("copies"))
    model, checkpoint = attention("copies")
    old = model.w_kc
    assert old is not None
    old[0, 0, 0] = 7.0
    live = laid_out(tmp_path, model, checkpoint)
    assert model.w_kc is old
    assert float(old[0, 0, 0]) == 1.0
    live[NAME].put(slice(0, 1), np.full(1, 0x4000, np.uint16))
    assert float(old[0, 0, 0]) == 2.0


def test_copies_in_a_pool_of_threads_are_seen() -> None:
    assert boxes("pool") == boxes("plain")
    with ThreadPoolExecutor() as pool:
        assert pool.submit(threading.get_ident).result() != threading.get_ident()


def test_a_loader_with_threads_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedEngine, match="copies in a thread of its own"):
        boxes("thread")
