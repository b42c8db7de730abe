"""Where the engine's own loader puts each checkpoint tensor, found by watching it load.

The running model's ``load_weights`` is called once more with the checkpoint's tensors, and every
copy into a parameter is written down instead of carried out: source and target are views, and a
view's first element and strides say which rectangle goes where. So whatever the loader knows about
fused projections, expert stacks, padding and this rank's slice is known here too, for any model
whose loader only copies.
A loader may compute what it copies, and make tensors *from* weights, wherever they hang (attribute,
buffer, list, dictionary, object); a commit in place would leave those old. Gemma's norms and MLA's
``w_kc`` and ``w_vc`` are known here, and proved by the live bits. Of others the loader's steps are
written down (``made``), so that they can be done again, and proved likewise. What they need of the
checkpoint and the engine has not any more is kept beside it. All of it is renewed with the weights,
at the same address; a model of which something cannot be is refused by that tensor's path.
A loader that throws away what it needs cannot be called again on the running model: it is watched
with another instance of the model on ``meta``, which holds no memory.
The result is kept in a file and used again while checkpoint, engine, ranks and parameters are the
same, whatever is known to be made of weights is what would be made now, and no steps are needed;
else the loader is watched again, which refuses the model or renews it.
Next step: ``parameters`` proves it against the live bytes.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from rose_core.delta.bits import number_format
from rose_core.delta.safetensors import StoredTensor
from rose_core.unreadable import UNREADABLE
from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors import parameters as live_parameters
from rose_engines.tensors.canonical import LiveTensor
from rose_engines.tensors.made import Made, Making, address, watching_reads
from rose_engines.tensors.parameters import Computed, Renewal
from rose_engines.tensors.recorder import KEPT_PART, Recorder, in_this_thread
from rose_engines.tensors.slices import Box

log = logging.getLogger(__name__)

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
# Another text makes the files worthless that were written by weaker rules.
_RULES = "what is made is made again or refused; boxes may be transposed; copies stay copies"
_OLD = (
    "the model keeps {!r}, which its loader makes from weights: it would stay old when they are "
    "changed in place, and tokens would be wrong under an attested version"
)
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Loader(Protocol):
    """A model of SGLang or vLLM, as far as it is needed here."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:  # noqa: ANN401
        """Copy checkpoint tensors into the parameters."""
        ...


class Placement(NamedTuple):
    """What a loader does.

    Attributes:
        boxes: of every checkpoint tensor on this rank; tied names are left out.
        computed: what it makes of others.
    """

    boxes: dict[str, tuple[Box, ...]]
    computed: Computed = Computed()


Twin = Callable[[], Any]
"""Makes another instance of the model, whose tensors are on ``meta``."""


def read_live(
    model: Loader,
    parameters: Mapping[str, torch.Tensor],
    checkpoint: Mapping[str, StoredTensor],
    *,
    cached: Path | None = None,
    engine: str = "",
    twin: Twin | None = None,
    whole: bool = True,
) -> dict[str, LiveTensor]:
    """The weights of a running model: found, proved, and with what is made of them.

    Args:
        model: as ``find`` takes it, like the others.
        parameters: its parameters by name.
        checkpoint: what it was started from.
        cached: where the layout is kept.
        engine: version, ranks and rank.
        twin: another instance.
        whole: this rank holds the model alone.

    Raises:
        UnsupportedEngine: names the tensor that could not be committed in place.
    """
    found = find(model, parameters, checkpoint, cached, engine, twin)
    if whole:
        check_placed(found.boxes)
    known = renewals(model, parameters)
    return live_parameters.live_tensors(parameters, checkpoint, found.boxes, known, found.computed)


def derive(
    model: Loader,
    parameters: Mapping[str, torch.Tensor],
    checkpoint: Mapping[str, StoredTensor],
    cached: Path | None = None,
    engine: str = "",
) -> dict[str, tuple[Box, ...]]:
    """``find`` for a loader that may only copy.

    Raises:
        UnsupportedEngine: as ``find``, or it computes.
    """
    return find(model, parameters, checkpoint, cached, engine, follow=False).boxes


def find(  # noqa: PLR0917
    model: Loader,
    parameters: Mapping[str, torch.Tensor],
    checkpoint: Mapping[str, StoredTensor],
    cached: Path | None = None,
    engine: str = "",
    twin: Twin | None = None,
    *,
    follow: bool = True,
) -> Placement:
    """Where a loader puts checkpoint tensors, and what it makes of them.

    Args:
        model: the running model; none of its parameters is changed.
        parameters: its parameters by name.
        checkpoint: what it was started from.
        cached: where the result is kept, None = nowhere.
        engine: version, ranks and rank; another text makes the file worthless.
        twin: for a loader that cannot be called again on the running model.
        follow: what it computes is computed again; else it is refused.

    Raises:
        UnsupportedEngine: the loader does what cannot be done again, or cannot be called again.
    """
    key = _key(parameters, checkpoint, engine)
    boxes = _read(cached, key) if cached is not None else None
    if boxes is not None and _all_renewed(model, parameters):
        return Placement(_untied(boxes, checkpoint))
    found = _watch(model, parameters, checkpoint, twin, follow=follow)
    if cached is not None and not found.computed.made:
        _write(cached, key, found.boxes)
    return found._replace(boxes=_untied(found.boxes, checkpoint))


class _Watched(NamedTuple):
    """What was seen of one call of a loader.

    Attributes:
        seen: its operations.
        made: tensors that it made and that are no parameters, by their path.
        error: how it failed.
    """

    seen: Recorder
    made: dict[str, torch.Tensor]
    error: Exception | None = None


def _watch(
    model: Loader,
    parameters: Mapping[str, torch.Tensor],
    checkpoint: Mapping[str, StoredTensor],
    twin: Twin | None,
    *,
    follow: bool,
) -> Placement:
    sources = {name: _tensor(*stored) for name, stored in checkpoint.items()}
    before, renewed = _reachable(model), _renewed(model)
    watched = _called(model, parameters, sources, before, renewed)
    if watched.error is not None and twin is not None:
        watched = _called_on(twin, sources) or watched
    if watched.error is not None:
        raise UnsupportedEngine(
            f"the engine's loader cannot be called again on the running model, so its weights "
            f"cannot be changed in place: {type(watched.error).__name__}: {watched.error}"
        ) from watched.error
    boxes = {name: tuple(watched.seen.boxes[name]) for name in checkpoint}
    if not follow:
        for why in watched.seen.computed.values():
            raise UnsupportedEngine(f"the engine's loader {why}")
        for path in watched.made:
            raise UnsupportedEngine(_OLD.format(path))
        return Placement(boxes)
    return _with_computed(boxes, watched, parameters, sources, before)


def _called_on(twin: Twin, sources: Mapping[str, torch.Tensor]) -> _Watched | None:
    """Have another instance of the model load, under watch; None = there can be none."""
    try:
        other = twin()
    except Exception as error:  # noqa: BLE001  # the engine's model may raise anything
        log.warning("rose: the model cannot be made without memory: %r", error)
        return None
    named = dict(other.named_parameters())
    return _called(other, named, sources, _reachable(other), [])


def _called(
    model: Loader,
    parameters: Mapping[str, torch.Tensor],
    sources: Mapping[str, torch.Tensor],
    before: Mapping[str, _Held],
    renewed: list[_Made],
) -> _Watched:
    """Have the loader load once more, under watch; whatever it replaced is put back."""
    recorder = Recorder(
        parameters, sources, {address(one.value) for one in _tensors(before).values()}
    )
    error, made, numbers = None, dict[str, torch.Tensor](), _numbers(model)
    try:
        with torch.no_grad(), in_this_thread(), watching_reads(recorder.trace), recorder:
            model.load_weights(iter(sources.items()))
        for one in renewed:
            # Some loaders make another tensor; a captured graph still reads the old one.
            setattr(one.module, one.key, one.tensor)
        made = _made_of_weights(model, parameters, before, recorder.written)
    except UnsupportedEngine:
        raise
    except Exception as failed:  # noqa: BLE001  # the engine's loader may raise anything
        error = failed
    _check_in_place(parameters, recorder.targets)
    if recorder.trace.values_were_read:
        _check_numbers(model, numbers)
    if made or error is not None:
        for held in before.values():
            # A captured graph still reads the memory of the old one.
            if isinstance(held.value, torch.Tensor | list | tuple | dict):
                held.put_back()
    return _Watched(recorder, made, error)


def _check_in_place(
    parameters: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]
) -> None:
    """Refuse a loader that gives a parameter other memory (``.data =``), and put the old back.

    Raises:
        UnsupportedEngine: names the parameter.
    """
    moved = [name for name, one in before.items() if address(parameters[name]) != address(one)]
    for name in moved:
        parameters[name].data = before[name]  # a captured graph reads this one
    if moved:
        raise UnsupportedEngine(f"the engine's loader gives {moved[0]!r} other memory")


def _numbers(model: Loader) -> dict[str, _Held]:
    """Numbers and arrays that hang on modules and what they hold, by path."""
    held = {"": model} | {path: one.value for path, one in _reachable(model).items()}
    return {
        f"{path}.{key}".lstrip("."): _Held(holder, key, value)
        for path, holder in held.items()
        for key, value in _entries(holder)
        if isinstance(value, float | np.ndarray)
    }


def _check_numbers(model: Loader, before: Mapping[str, _Held]) -> None:
    """Refuse a loader that looks at weights and keeps a number: it may be made of them.

    Raises:
        UnsupportedEngine: names the number; the old one is back.
    """
    for path, now in _numbers(model).items():
        if path not in before or before[path].value is not now.value:
            if path in before:
                before[path].put_back()
            raise UnsupportedEngine(_OLD.format(path))


def _with_computed(
    boxes: dict[str, tuple[Box, ...]],
    watched: _Watched,
    parameters: Mapping[str, torch.Tensor],
    sources: Mapping[str, torch.Tensor],
    before: Mapping[str, _Held],
) -> Placement:
    """What is computed, and all that is needed to compute it again.

    Raises:
        UnsupportedEngine: names what cannot be computed again.
    """
    seen = watched.seen
    # What a loader threw away after it had loaded it is a step on the way to something else.
    gone = seen.targets.keys() - parameters.keys()
    computed = {name: why for name, why in seen.computed.items() if name not in gone}
    for name, found in boxes.items():
        # One that lies in several parameters is held by one of them, and the others follow.
        several = [box for box in found if box.parameter not in gone]
        if len({box.parameter for box in several}) > 1:
            whole = [box for box in several if _is_whole(box, sources[name], parameters)]
            held_by = whole[0].parameter if whole else ""
            others = {box.parameter for box in several} - {held_by}
            computed |= {one: f"loads {name!r} into {one!r} too" for one in others}
    while True:
        makings = _makings(computed, gone, watched)
        used = {one for how in makings.values() for one in how.leaves}
        names = {seen.trace.sources[one] for one in used & seen.trace.sources.keys()}
        held, shared = dict[str, Box](), dict[str, str]()
        for name in names:
            places = [box for box in boxes[name] if box.parameter not in gone | computed.keys()]
            if len(places) == 1 and _is_whole(places[0], sources[name], parameters):
                held[name] = places[0]
                continue
            for box in places:
                why = f"loads {name!r}, which it computes with, into {box.parameter!r} too"
                shared[box.parameter] = why
        if not shared:
            break
        computed |= shared
    kept = names - held.keys()
    left = {
        name: tuple(box for box in found if box.parameter not in gone | computed.keys())
        for name, found in boxes.items()
        if name not in kept
    }
    if not makings:
        return Placement(left)
    _check_kept(kept, sources, parameters, makings)
    there = {path: held.value for path, held in _tensors(before).items()} | dict(parameters)
    return Placement(left, _computed(makings, kept, held, watched, sources, there))


def _is_whole(box: Box, source: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> bool:
    """Whether a parameter holds a checkpoint tensor as it is, at the beginning of its memory."""
    there = parameters[box.parameter]
    first = box.target_first == box.first == int(there.storage_offset()) == 0
    one_run = box.rows == box.target_step == 1 and box.columns == source.numel()
    return first and one_run and bool(there.is_contiguous()) and there.dtype == source.dtype


def _makings(
    computed: Mapping[str, str], gone: Iterable[str], watched: _Watched
) -> dict[str, Making]:
    """How each computed parameter and each tensor that is made of weights is made.

    Raises:
        UnsupportedEngine: names the first that cannot be made again.
    """
    seen, found = watched.seen, dict[str, Making]()
    other = {*computed, *gone}
    plain = {
        number for number, names in seen.trace.parameters.items() if not other.intersection(names)
    }
    for name, why in computed.items():
        how = seen.trace.making(seen.targets[name], plain)
        if isinstance(how, str):
            raise UnsupportedEngine(f"the engine's loader {why}: {how}")
        if not how.leaves:  # memory that was given back and taken again would stay empty
            raise UnsupportedEngine(f"the engine's loader {why}, of no checkpoint tensor")
        found[name] = how
    for path, tensor in watched.made.items():
        how = seen.trace.making(tensor, plain)
        if path in seen.targets:
            how = "it replaces a parameter"
        if isinstance(how, str):
            raise UnsupportedEngine(f"{_OLD.format(path)} ({how})")
        found[path] = how
    return found


def _check_kept(
    kept: Iterable[str],
    sources: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    makings: Mapping[str, Making],
) -> None:
    most = sum(one.nbytes for one in parameters.values()) // KEPT_PART
    wanted = sum(sources[name].nbytes for name in kept)
    if wanted > most:
        raise UnsupportedEngine(
            f"the engine's loader computes {next(iter(makings))!r} and others; to do that again "
            f"{wanted} bytes of the checkpoint would have to be kept beside the engine's weights, "
            f"and at most {most} may"
        )


def _computed(  # noqa: PLR0917
    makings: Mapping[str, Making],
    kept: Iterable[str],
    held: Mapping[str, Box],
    watched: _Watched,
    sources: Mapping[str, torch.Tensor],
    there: Mapping[str, torch.Tensor],
) -> Computed:
    """What is made in the running model, with the memory that it is made of."""
    trace, targets = watched.seen.trace, watched.seen.targets
    device = next(there[name].device for name in targets if name in there)
    copies = {name: sources[name].to(device, copy=True) for name in sorted(kept)}
    found = dict[str, list[Made]]()
    for path, how in makings.items():
        tensor, watched_one = there.get(path), targets.get(path, watched.made.get(path))
        if tensor is None or watched_one is None or not _alike(tensor, watched_one):
            raise UnsupportedEngine(f"the running model has another {path!r} than its loader makes")
        given, needs = dict[int, torch.UntypedStorage](), set[str]()
        for number in how.leaves:
            name = trace.sources.get(number)
            if name is not None and name in held:
                parameter = held[name].parameter
                given[number] = there[parameter].untyped_storage()
                needs.add(parameter)
                continue
            if name is not None:
                given[number] = copies[name].untyped_storage()
                needs.add(name)
                continue
            names = trace.parameters[number]
            if not _same_place(there[names[0]], targets[names[0]]):
                raise UnsupportedEngine(f"the running model keeps {names[0]!r} in other places")
            given[number] = there[names[0]].untyped_storage()
            needs.update(names)
        made = Made(path, tensor.detach(), how, given)
        made.prove()
        for name in needs:
            found.setdefault(name, []).append(made)
    into = frozenset(makings.keys() & there.keys() & targets.keys())
    feeds = {
        name: tuple(made.path for made in several if made.path in into)
        for name, several in found.items()
    }
    # One object for all that renew the same: a commit calls it once.
    same: dict[tuple[int, ...], Renewal] = {}
    for several in found.values():
        same.setdefault(tuple(map(id, several)), _renewal(several))
    renewed = {name: same[tuple(map(id, several))] for name, several in found.items()}
    return Computed(tuple(makings), copies, renewed, into, feeds)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    places = [(tuple(side.stride()), int(side.storage_offset())) for side in (one, other)]
    return _alike(one, other) and places[0] == places[1]


# What models of SGLang are known to make of weights, also where the loader does not renew it.
_KNOWN_DERIVED = {"w_kc", "w_vc", "w_scale_k", "w_scale_v"}
# Nothing in there is a tensor of the model, and much of it is the whole process.
_NOT_FOLLOWED = (type, ModuleType, Enum, torch.dtype, torch.device, torch.Size)


class _Made(NamedTuple):
    """A tensor that a module keeps of a weight, and how it is made.

    Attributes:
        module, key: where it hangs.
        tensor: it; it stays at this address.
        weight: what it is made of.
        make: what it would be now.
    """

    module: torch.nn.Module
    key: str
    tensor: torch.Tensor
    weight: torch.Tensor
    make: Callable[[], torch.Tensor]

    def renew(self) -> None:
        """Make it anew, in place."""
        self.tensor.copy_(self.make())

    def is_current(self) -> bool:
        """Whether it is what would be made now, to the bit."""
        now = self.make()
        return now.dtype == self.tensor.dtype and torch.equal(self.tensor, now)


def renewals(model: Loader, parameters: Mapping[str, torch.Tensor]) -> dict[str, Renewal]:
    """Parameter -> what is made of it, so that nothing of it stays old or is attested old."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    by_name = defaultdict[str, list[_Made]](list)
    for made in _renewed(model):
        if id(made.weight) in names:
            by_name[names[id(made.weight)]].append(made)
    return {name: _renewal(found) for name, found in by_name.items()}


class _Renewable(Protocol):
    """``_Made`` or ``Made``."""

    def renew(self) -> None: ...

    def is_current(self) -> bool: ...


def _renewal(found: Sequence[_Renewable]) -> Renewal:
    def renew() -> None:
        with torch.no_grad():
            for made in found:
                made.renew()

    def current() -> bool:
        with torch.no_grad():
            return all(made.is_current() for made in found)

    return Renewal(renew, current)


def _renewed(model: Loader) -> list[_Made]:
    """Tensors that are made of one weight each in a known way, which the live bits prove."""
    with torch.no_grad():
        return [made for made in _known(model) if not made.tensor.is_meta and made.is_current()]


def _known(model: Loader) -> list[_Made]:
    """Tensors whose making would be known, if the live bits proved it."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return [made for module in modules for made in (*_shifted(module), *_absorbed(module))]


def _all_renewed(model: Loader, parameters: Mapping[str, torch.Tensor]) -> bool:
    """Whether nothing that models are known to make of weights would stay old after a commit."""
    renewed = _renewed(model)
    if len(renewed) < len(_known(model)):
        return False
    own = _followed(parameters, renewed)
    return not any(
        held.key in _KNOWN_DERIVED and held.value.numel() and address(held.value) not in own
        for held in _tensors(_reachable(model)).values()
    )


def _followed(parameters: Mapping[str, torch.Tensor], renewed: Iterable[_Made]) -> set[int]:
    """Addresses of parameters, whose views follow them, and of what is renewed with them."""
    named = {id(one) for one in parameters.values()}
    own = {address(one) for one in parameters.values()}
    return own | {address(made.tensor) for made in renewed if id(made.weight) in named}


def _shifted(module: torch.nn.Module) -> Iterator[_Made]:
    """Norms that keep their weight plus one (Gemma)."""
    kept, weight = getattr(module, "gemma_weight", None), getattr(module, "weight", None)
    if isinstance(kept, torch.Tensor) and isinstance(weight, torch.Tensor):
        made = functools.partial(_plus_one, kept, weight)
        yield _Made(module, "gemma_weight", kept, weight, made)


def _plus_one(like: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like).copy_(weight).add_(1)


def _absorbed(module: torch.nn.Module) -> Iterator[_Made]:
    """Latent attention (MLA) that keeps the two halves of ``kv_b_proj`` apart, by head."""
    weight = getattr(getattr(module, "kv_b_proj", None), "weight", None)
    sizes = [getattr(module, name, 0) for name in ("qk_nope_head_dim", "v_head_dim")]
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not all(sizes):
        return
    if weight.shape[0] % sum(sizes):
        return
    for key, number in (("w_kc", 0), ("w_vc", 1)):
        kept = getattr(module, key, None)
        if isinstance(kept, torch.Tensor):
            made = functools.partial(_half, weight, sizes, number)
            yield _Made(module, key, kept, weight, made)


def _half(weight: torch.Tensor, sizes: list[int], number: int) -> torch.Tensor:
    """Keys as (head, key, latent), values as (head, latent, value)."""
    heads = weight.detach().view(-1, sum(sizes), weight.shape[1])
    return heads[:, sizes[0] :].transpose(1, 2) if number else heads[:, : sizes[0]]


class _Held(NamedTuple):
    """What a model holds somewhere: a tensor, or something that may hold tensors.

    Attributes:
        holder: a module, another object, a list, a tuple or a dictionary.
        key: attribute, index or key in it.
        value: what is there.
    """

    holder: Any
    key: Any
    value: Any

    def put_back(self) -> None:
        """Have the holder hold it again; what is in a tuple cannot have changed."""
        if isinstance(self.holder, list):
            self.holder[self.key : self.key + 1] = [self.value]
        elif isinstance(self.holder, dict):
            self.holder[self.key] = self.value
        elif not isinstance(self.holder, tuple):
            vars(self.holder)[self.key] = self.value


def _reachable(model: Loader) -> dict[str, _Held]:
    """Whatever hangs on the modules, by path: everything once, parameters and buffers too.

    Also what is in lists, dictionaries and objects that are no modules; not what a class, a
    closure or slots hold.
    """
    if not isinstance(model, torch.nn.Module):
        return {}
    found: dict[str, _Held] = {}
    seen = {id(model)}
    waiting: list[tuple[str, Any]] = [("", model)]
    while waiting:
        path, holder = waiting.pop()
        for key, value in _entries(holder):
            if isinstance(value, _NOT_FOLLOWED) or not _may_hold(value) or id(value) in seen:
                continue
            seen.add(id(value))
            # Modules keep submodules, parameters and buffers in dictionaries of their own.
            inner = isinstance(holder, torch.nn.Module) and key in _OF_MODULES
            name = path if inner else f"{path}.{key}".lstrip(".")
            found[f"{path}.{key}" if inner else name] = _Held(holder, key, value)
            waiting.append((name, value))
    return found


_OF_MODULES = {"_modules", "_parameters", "_buffers"}


def _may_hold(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, torch.Tensor | list | tuple | dict) or hasattr(value, "__dict__")


def _entries(holder: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401
    if isinstance(holder, list | tuple):
        return list(enumerate(holder))
    entries = list(holder.items()) if isinstance(holder, dict) else []
    return entries + list(getattr(holder, "__dict__", {}).items())


def _made_of_weights(
    model: Loader,
    parameters: Mapping[str, torch.Tensor],
    before: Mapping[str, _Held],
    written: set[int],
) -> dict[str, torch.Tensor]:
    """Tensors that are no parameters and that loading changed, by path.

    Args:
        model: after its loader was called once more.
        parameters: its parameters; views of those that it still has follow them.
        before: what it held before.
        written: addresses of memory of before that the loader wrote to.
    """
    there = {address(held.value) for held in _tensors(before).values()}
    # One that was made just now is right, but a captured graph reads the one before it.
    renewed = [made for made in _renewed(model) if address(made.tensor) in there]
    kept = {id(one) for one in model.parameters()} if isinstance(model, torch.nn.Module) else set()
    own = _followed({name: one for name, one in parameters.items() if id(one) in kept}, renewed)
    changed = dict[str, torch.Tensor]()
    for path, held in _tensors(_reachable(model)).items():
        place = address(held.value)
        if place in own or not held.value.numel():
            continue
        if place not in there or place in written or held.key in _KNOWN_DERIVED:
            changed[path] = held.value
    return changed


def _tensors(held: Mapping[str, _Held]) -> dict[str, _Held]:
    """Those that are tensors with plain memory."""
    return {
        path: one
        for path, one in held.items()
        if isinstance(one.value, torch.Tensor) and one.value.layout is torch.strided
    }


def _tensor(dtype: str, shape: tuple[int, ...], bits: np.ndarray) -> torch.Tensor:
    """A checkpoint tensor over the mapped file; nothing is copied."""
    if dtype not in _DTYPES:
        raise UnsupportedEngine(f"element type {dtype!r} of the checkpoint is not supported")
    width = number_format(dtype).width
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the map cannot be written; nobody does
        flat = torch.from_numpy(bits.view(f"i{width}" if width > 1 else "u1"))
    return flat.view(_DTYPES[dtype]).view(shape)


def _untied(
    found: dict[str, tuple[Box, ...]], checkpoint: Mapping[str, StoredTensor]
) -> dict[str, tuple[Box, ...]]:
    """Without an output matrix that the loader skips because it is the embedding matrix."""
    skipped = found.get(_HEAD) == () and _EMBEDDING in checkpoint
    if skipped and np.array_equal(checkpoint[_HEAD][2], checkpoint[_EMBEDDING][2]):
        return {name: boxes for name, boxes in found.items() if name != _HEAD}
    return found


def _key(
    parameters: Mapping[str, torch.Tensor], checkpoint: Mapping[str, StoredTensor], engine: str
) -> str:
    lines = [_RULES, engine]
    lines += [f"{name} {stored[0]} {stored[1]}" for name, stored in checkpoint.items()]
    lines += [f"{name} {one.dtype} {tuple(one.shape)}" for name, one in parameters.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Cached(msgspec.Struct, frozen=True):
    """The file.

    Attributes:
        key: what it was derived from.
    """

    key: str
    boxes: dict[str, tuple[Box, ...]]


def _read(path: Path, key: str) -> dict[str, tuple[Box, ...]] | None:
    try:
        cached = msgspec.msgpack.decode(path.read_bytes(), type=_Cached)
    except (OSError, *UNREADABLE):
        return None
    return cached.boxes if cached.key == key else None


def _write(path: Path, key: str, boxes: dict[str, tuple[Box, ...]]) -> None:
    try:
        temporary = path.with_name(f".{path.name}")
        temporary.write_bytes(msgspec.msgpack.encode(_Cached(key, boxes)))
        temporary.replace(path)
    except OSError as error:  # it is derived again next time
        log.warning("rose: the layout cannot be kept in %s: %s", path, error)


def check_placed(layout: Mapping[str, tuple[Box, ...]]) -> None:
    """Refuse a model of which this rank holds only a part.

    Raises:
        UnsupportedEngine: names a checkpoint tensor that lies nowhere.
    """
    missing = [name for name, boxes in layout.items() if not boxes]
    if missing:
        raise UnsupportedEngine(
            f"the engine's loader puts checkpoint tensor {missing[0]!r} nowhere "
            f"({len(missing)} such tensors)"
        )
