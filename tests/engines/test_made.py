"""What a loader computes is computed again with a commit, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from rose_core.delta.digest import digest_run
from rose_core.delta.safetensors import StoredTensor
from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors.canonical import LiveTensor, host_tensors
from rose_engines.tensors.layout import read_live
from rose_engines.tensors.made import Making, Trace
from rose_engines.tensors.recorder import Recorder
from rose_engines.tensors.safetensors import write_file
from rose_engines.weights.memory import reload_weights

Checkpoint = dict[str, StoredTensor]
Act = Callable[["Space", torch.Tensor], object]
BIG, SMALL = "weight", "A_log"


def stored(tensors: dict[str, torch.Tensor]) -> Checkpoint:
    words = {torch.bfloat16: ("BF16", torch.int16, "u2"), torch.float32: ("F32", torch.int32, "u4")}
    found: Checkpoint = {}
    for name, tensor in tensors.items():
        word, integers, unsigned = words[tensor.dtype]
        bits = tensor.reshape(-1).view(integers).numpy().view(unsigned)
        found[name] = StoredTensor(word, tuple(tensor.shape), bits)
    return found


def checkpoint(seed: int, kind: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    sizes = {BIG: (16, 16), SMALL: (4,)}
    found = {name: torch.randn(size, generator=draw).to(kind) for name, size in sizes.items()}
    found[SMALL][0] = seed  # above a bound, or not
    found[SMALL][1] = seed - 1  # zero, or not
    found[SMALL][2] = 3 - 2 * seed  # positive, or not
    return found


class Space(torch.nn.Module):
    """A model with one large weight, which is copied, and something made of a small one.

    Args:
        act: what its loader does with the small one.
    """

    beta: torch.Tensor
    scale = 1.0
    scales: list[float]
    array: object

    def __init__(self, act: Act, kind: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.act = act
        self.weight = torch.nn.Parameter(torch.zeros(16, 16, dtype=torch.bfloat16), False)
        self.A = torch.nn.Parameter(torch.zeros(4, dtype=kind), False)
        self.register_buffer("beta", torch.zeros(4))
        self.kept: list[torch.Tensor] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, given in weights:
            if name == BIG:
                self.weight.data.copy_(given)
            else:
                self.act(self, given)


def _decay(model: Space, given: torch.Tensor) -> None:
    """As SGLang's ``composed_weight_loader`` does it."""
    model.A.data.copy_(given)
    model.A.data.copy_(-torch.exp(model.A.float()))


def _parts(model: Space, given: torch.Tensor) -> None:
    model.A.data[:2].copy_(given[2:] * 2)
    torch.mul(given[:2], 3, out=model.A.data[2:])


def _beta(model: Space, given: torch.Tensor) -> None:
    model.beta.copy_(given)
    model.A.data.copy_(model.beta)


def _kept(model: Space, given: torch.Tensor) -> None:
    model.A.data.copy_(given)
    model.kept = [torch.empty(2, 2).copy_(model.A.view(2, 2).t()), model.weight[:1] + 1]


def _scalars(model: Space, given: torch.Tensor) -> None:
    """As the loaders of SGLang and vLLM fill in a single element."""
    for number in range(4):
        model.A.data[number : number + 1].fill_(given[number].item())


def _turned(model: Space, given: torch.Tensor) -> None:
    """Memory that is not contiguous, and has to be filled to see that all of it is written."""
    turned = torch.empty_like(given.view(2, 2).t(), dtype=torch.float32)
    model.A.data.copy_(turned.copy_(given.view(2, 2)).reshape(-1))


def _joined_and_changed(model: Space, given: torch.Tensor) -> None:
    """The bits of the first checkpoint are as they were, those of the second are not."""
    model.A.data.copy_(torch.cat([given[:2], given[2:]]).clamp_(max=1.5))


def _filled_over(model: Space, given: torch.Tensor) -> None:
    model.A.data.copy_(given)
    model.A.data[1:2].fill_(0)


FOLLOWED: dict[str, Act] = {
    "a function of what was copied": _decay,
    "a function": lambda model, given: model.A.data.copy_(-torch.exp(given.float())),
    "other bits": lambda model, given: model.A.data.copy_(given.view(torch.int16)),
    "by parts": _parts,
    "numbers": _scalars,
    "a buffer": _beta,
    "tensors in a list": _kept,
    "memory in another order": _turned,
    "joined, then changed in place": _joined_and_changed,
    "copied, then filled": _filled_over,
}


def laid_out(model: Space, tensors: dict[str, torch.Tensor]) -> dict[str, LiveTensor]:
    model.load_weights(iter(tensors.items()))
    return read_live(model, dict(model.named_parameters()), stored(tensors))


def everything(model: torch.nn.Module) -> list[torch.Tensor]:
    found = [*model.parameters(), *model.buffers(), *getattr(model, "kept", [])]
    return [*found, *(value for key, value in vars(model).items() if key.startswith("w_"))]


def committed(
    model: Space | Thrown,
    live: dict[str, LiveTensor],
    to: dict[str, torch.Tensor],
    fresh: Space | Thrown,
) -> None:
    """Commit another checkpoint and compare with a model that loads it, addresses and digests."""
    places = [one.data_ptr() for one in everything(model)]
    for name, (_, _, bits) in stored(to).items():
        where, kept = live[name].own(slice(0, bits.size))
        live[name].put(where, bits if kept is None else bits[kept])
        assert live[name].digest() == digest_run(name, 0, bits)
    fresh.load_weights(iter(to.items()))
    for ours, other in zip(everything(model), everything(fresh), strict=True):
        assert torch.equal(ours, other)
    assert [one.data_ptr() for one in everything(model)] == places


@pytest.mark.parametrize("how", FOLLOWED)
def test_what_is_computed_follows_a_commit_and_its_undo_at_the_same_address(how: str) -> None:
    first, second = checkpoint(1), checkpoint(2)
    model = Space(FOLLOWED[how])
    live = laid_out(model, first)
    committed(model, live, second, Space(FOLLOWED[how]))
    committed(model, live, first, Space(FOLLOWED[how]))


def test_a_conversion_that_rounds_follows_a_commit() -> None:
    first, second = checkpoint(1, torch.float32), checkpoint(2, torch.float32)
    first[BIG], second[BIG] = first[BIG].bfloat16(), second[BIG].bfloat16()

    def act(model: Space, given: torch.Tensor) -> None:
        model.A.data.copy_(given)

    model = Space(act, torch.bfloat16)
    committed(model, laid_out(model, first), second, Space(act, torch.bfloat16))


def test_what_does_not_follow_makes_the_digest_wrong() -> None:
    model, tensors = Space(_decay), checkpoint(1)
    live = laid_out(model, tensors)
    right = live[SMALL].digest()
    with torch.no_grad():
        model.A[1] += 1
    assert live[SMALL].digest() != right


def _looks(read: Callable[[torch.Tensor], object]) -> Act:
    def act(model: Space, given: torch.Tensor) -> None:
        read(given.float())
        model.A.data.copy_(given + 1)

    return act


def _number(made: Callable[[float], float]) -> Act:
    def act(model: Space, given: torch.Tensor) -> None:
        for number in range(4):
            model.A.data[number : number + 1].fill_(made(given[number].item()))

    return act


def _rare(model: Space, given: torch.Tensor) -> None:
    """Chance that a second look hardly meets."""
    drawn = torch.rand_like(given.float()) < 1e-7
    model.A.data.copy_(torch.where(drawn, given * 2, given))


def _copied_and(act: Act) -> Act:
    def both(model: Space, given: torch.Tensor) -> None:
        model.A.data.copy_(given)
        act(model, given)

    return both


def _scale(model: Space, given: torch.Tensor) -> None:
    model.scale = float(given[0])


def _scales(model: Space, given: torch.Tensor) -> None:
    model.scales = [float(given[0])]


def _array(model: Space, given: torch.Tensor) -> None:
    model.array = given.float().numpy().copy()


def _elsewhere(model: Space, _: torch.Tensor) -> None:
    model.A.data = model.A.data.clone()


def _expanded(model: Space, given: torch.Tensor) -> None:
    model.kept = [given.float()[:1].expand(4)]


def _ones(model: Space, given: torch.Tensor) -> None:
    model.beta.copy_(given)
    model.A.data.copy_(torch.ones(4))


def _much(model: Space, given: torch.Tensor) -> None:
    model.A.data.copy_(given)
    model.kept = [model.weight.float()]


REFUSED: dict[str, tuple[Act, str]] = {
    "a value": (_looks(lambda one: one.max().item()), "looks at values"),
    "a list": (_looks(lambda one: one.tolist()), "looks at values"),
    "an array": (_looks(lambda one: one.numpy()), "looks at values"),
    "the larger number": (_number(lambda one: max(one, -100.0)), "nowhere"),
    "a function of a number": (_number(math.exp), "nowhere"),
    "a constant": (
        lambda model, given: model.A.data.copy_(given * torch.tensor([1, 2, 3, 4])),
        "'A'.*something else",
    ),
    "chance": (lambda model, given: model.A.data.copy_(torch.rand_like(given)), "'A'.*else"),
    "what was there": (lambda model, given: model.A.data.add_(given), "'A'.*something else"),
    "what was in a buffer": (lambda model, given: model.beta.clamp_(min=given), "'beta'.*else"),
    "what it is given": (lambda _, given: given.mul_(2), "writes to 'A_log'"),
    "rare chance": (_rare, "'A'.*something else"),
    "how many are positive": (
        lambda model, given: model.A.data.copy_(given[given > 0].sum() + given),
        "looks at values",
    ),
    "where they are positive": (
        lambda model, given: model.A.data.copy_((given > 0).nonzero().sum() + given),
        "looks at values",
    ),
    "a number that it keeps": (_copied_and(_scale), "keeps 'scale'"),
    "a number in a list that it keeps": (_copied_and(_scales), r"keeps 'scales\.0'"),
    "an array that it keeps": (_copied_and(_array), "keeps 'array'"),
    "other memory": (_copied_and(_elsewhere), "'A' other memory"),
    "a tensor that cannot be written": (_copied_and(_expanded), "'kept.0'.*more than one element"),
    "nothing of the checkpoint": (_ones, "'A', of no checkpoint tensor"),
    "too much": (_much, "'kept.0'.*too much"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_surely_no_function_of_the_checkpoint_is_refused_by_name(how: str) -> None:
    act, reason = REFUSED[how]
    model, tensors = Space(act), checkpoint(1)
    given = {name: one.clone() for name, one in tensors.items()}
    model.load_weights(iter(given.items()))
    before = {name: one.clone() for name, one in model.named_parameters()}
    places = [one.data_ptr() for one in model.parameters()]
    with pytest.raises(UnsupportedEngine, match=reason):
        read_live(model, dict(model.named_parameters()), stored(tensors))
    assert [one.data_ptr() for one in model.parameters()] == places
    assert all(torch.equal(before[name], one) for name, one in model.named_parameters())


class Tied(Space):
    """A loader that puts one checkpoint tensor into two parameters (LFM2)."""

    def __init__(self) -> None:
        super().__init__(lambda model, given: model.A.data.copy_(given))
        self.lm_head = torch.nn.Parameter(torch.zeros(16, 16, dtype=torch.bfloat16), False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, given in weights:
            super().load_weights([(name, given)])
            if name == BIG:
                self.lm_head.data.copy_(given)


def test_a_tensor_in_two_parameters_is_held_once_and_followed() -> None:
    model = Tied()
    committed(model, laid_out(model, checkpoint(1)), checkpoint(2), Tied())


class Thrown(torch.nn.Module):
    """A loader that throws away what it needs to load again, as MiniCPM3's does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(16, 16, dtype=torch.bfloat16), False)
        self.kv_b_proj: torch.nn.Module | None = torch.nn.Linear(2, 2, False, dtype=torch.bfloat16)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        named = dict(self.named_parameters())
        for name, given in weights:
            named[name].data.copy_(given)
        made = self.kv_b_proj.weight.detach()  # type: ignore[union-attr,operator]
        self.w_kc, self.w_vc = made[:1].t().contiguous(), made[1:].contiguous().t()
        del self.kv_b_proj


def _meta() -> Thrown:
    with torch.device("meta"):
        return Thrown()


def thrown(seed: int) -> dict[str, torch.Tensor]:
    found = checkpoint(seed)
    return {BIG: found[BIG], "kv_b_proj.weight": found[SMALL].view(2, 2)}


def test_a_loader_that_cannot_be_called_again_is_watched_with_another_instance() -> None:
    model, tensors = Thrown(), thrown(1)
    model.load_weights(iter(tensors.items()))
    live = read_live(model, dict(model.named_parameters()), stored(tensors), twin=_meta)
    committed(model, live, thrown(2), Thrown())


def test_without_another_instance_it_is_refused_and_left_as_it_was() -> None:
    model, tensors = Thrown(), thrown(1)
    model.load_weights(iter(tensors.items()))
    before = everything(model)
    with pytest.raises(UnsupportedEngine, match=r"cannot be called again.*kv_b_proj\.weight"):
        read_live(model, dict(model.named_parameters()), stored(tensors))
    assert all(one is other for one, other in zip(everything(model), before, strict=True))


def test_what_a_loader_reorders_before_it_copies_lies_in_boxes() -> None:
    """As Persimmon's rows of queries, keys and values, which are by head: nothing is kept twice."""

    class Reordered(Space):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, given in weights:
                if name == BIG:
                    given = given.view(2, 4, 2, 16).transpose(0, 1).reshape(16, 16)  # noqa: PLW2901
                    for rows in (slice(0, 8), slice(8, 16)):  # in parts, as a fused layer does it
                        self.weight.data[rows].copy_(given[rows])
                else:
                    super().load_weights([(name, given)])

    def plain(model: Space, given: torch.Tensor) -> None:
        model.A.data.copy_(given)

    model = Reordered(plain, torch.bfloat16)
    live = laid_out(model, checkpoint(1))
    committed(model, live, checkpoint(2), Reordered(plain, torch.bfloat16))


class Rearranged(Space):
    """As GPT-OSS transposes its experts, with what was transposed changed in place."""

    def __init__(self, limit: float = math.inf) -> None:
        super().__init__(lambda model, given: model.A.data.copy_(given))
        self.limit = limit

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, given in weights:
            if name == SMALL:
                self.A.data.copy_(given)
            elif math.isinf(self.limit):
                self.weight.data[:8].copy_(given.t()[8:])
                self.weight.data[8:].copy_(given.t()[:8])
            else:
                self.weight.data.copy_(given.t().contiguous().clamp_(max=self.limit))


def test_what_is_reordered_and_then_changed_in_place_is_no_copy() -> None:
    """It was taken for one where the change did nothing to the weights of the start."""
    model, tensors = Rearranged(limit=100.0), checkpoint(1)
    with pytest.raises(UnsupportedEngine, match="'weight'"):  # computed, and too large to be kept
        laid_out(model, tensors)


def test_a_transposed_model_is_loaded_anew_and_written_as_it_was_published(tmp_path: Path) -> None:
    """Both took the engine's order for the checkpoint's; the engine was broken by its dormancy."""
    tensors = checkpoint(1)
    write_file(tmp_path / "model.safetensors", host_tensors(stored(tensors)))
    model = Rearranged()
    live = laid_out(model, tensors)
    before = [one.clone() for one in everything(model)]
    write_file(tmp_path / "export", live)
    assert (tmp_path / "export").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    reload_weights([one.detach() for one in model.parameters()], live, tmp_path)
    assert all(torch.equal(*both) for both in zip(before, everything(model), strict=True))


def test_what_would_be_made_in_another_size_is_neither_made_nor_attested() -> None:
    """A loader's numbers have the default type, which may be another by the time of a commit."""

    def act(model: Space, given: torch.Tensor) -> None:
        model.A.data.copy_(given.view(torch.int16) / 3)

    live = laid_out(Space(act), checkpoint(1))
    before, bits = live[SMALL].digest(), live[SMALL].all_bits().copy()
    torch.set_default_dtype(torch.float64)
    try:
        assert live[SMALL].digest() != before
        with pytest.raises(UnsupportedEngine, match="made 32 bytes, not 16"):
            live[SMALL].put(slice(0, 4), bits)
    finally:
        torch.set_default_dtype(torch.float32)
    assert live[SMALL].digest() == before


def test_a_function_that_ran_on_another_kind_of_device_is_known() -> None:
    """An exponential of a CPU differs from a GPU's in its last bit, and may agree by chance."""
    given = torch.rand(4)
    trace = Trace({SMALL: given}, {}, 1 << 10)
    outer = Recorder({}, {SMALL: given}, set())
    outer.trace = trace
    with outer:
        moved = torch.cat([given, given]).double()
        made = moved.exp()
    copied, computed = trace.making(moved, ()), trace.making(made, ())
    assert isinstance(copied, Making)
    assert isinstance(computed, Making)
    assert copied.differs_on("cuda") is None
    assert computed.differs_on("cpu") is None
    assert computed.differs_on("cuda") is torch.ops.aten.exp.default
