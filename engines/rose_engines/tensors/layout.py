"""Where the engine's own loader puts each checkpoint tensor, found by watching it load.

The running model's ``load_weights`` is called once more with the checkpoint's tensors, and every
copy into a parameter is written down instead of carried out: source and target are views, and a
view's first element and strides say which rectangle goes where. So whatever the loader knows about
fused projections, expert stacks, padding and this rank's slice is known here too, for any model
whose loader only copies. One that computes (converts, transposes, repacks) is refused by name.
A model may keep tensors which its loader makes *from* weights. Those whose making is known here and
proved by the live bits (Gemma's norms, MLA's ``w_kc`` and ``w_vc``) are renewed with the weight, at
the same address. A model with any other is refused by the path of that tensor, wherever it hangs
(attribute, buffer, list, dictionary, object): a commit in place would leave it old.
The result is kept in a file and used again while checkpoint, engine, ranks and parameters are the
same and whatever is known to be made of weights is what would be made now; else the loader is
watched again, which refuses the model or renews it.
Next step: ``parameters`` proves it against the live bytes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rose_core.delta.bits import number_format
from rose_core.unreadable import UNREADABLE
from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors.parameters import Renewal
from rose_engines.tensors.safetensors import StoredTensor
from rose_engines.tensors.slices import Box, boxes_of

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
_FILLS = {
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
}
# Copies that a loader makes of what it was given: the original is as good.
_COPIES = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}  # noqa: SLF001
# Another text makes the files worthless that were written by weaker rules.
_RULES = "derived tensors are refused unless their making is known; BF16 may be kept in 32 bits"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Loader(Protocol):
    """A model of SGLang or vLLM, as far as it is needed here."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:  # noqa: ANN401
        """Copy checkpoint tensors into the parameters."""
        ...


def derive(
    model: Loader,
    parameters: Mapping[str, torch.Tensor],
    checkpoint: Mapping[str, StoredTensor],
    cached: Path | None = None,
    engine: str = "",
) -> dict[str, tuple[Box, ...]]:
    """Boxes of every checkpoint tensor on this rank; tied names are left out.

    Args:
        model: the running model; none of its parameters is changed.
        parameters: its parameters by name.
        checkpoint: what it was started from.
        cached: where the result is kept, None = nowhere.
        engine: version, ranks and rank; another text makes the file worthless.

    Raises:
        UnsupportedEngine: the loader does something else than copying, or cannot be called again.
    """
    key = _key(parameters, checkpoint, engine)
    found = _read(cached, key) if cached is not None else None
    if found is None or not _all_renewed(model, parameters):
        found = _watch(model, parameters, checkpoint)
        if cached is not None:
            _write(cached, key, found)
    return _untied(found, checkpoint)


def _watch(
    model: Loader, parameters: Mapping[str, torch.Tensor], checkpoint: Mapping[str, StoredTensor]
) -> dict[str, tuple[Box, ...]]:
    sources = {name: _tensor(*stored) for name, stored in checkpoint.items()}
    before, renewed = _reachable(model), _renewed(model)
    watched = {_address(held.value) for held in _tensors(before).values()}
    recorder = _Recorder(parameters, sources, watched)
    try:
        with torch.no_grad(), _in_this_thread(), recorder:
            model.load_weights(iter(sources.items()))
        for made in renewed:
            # Some loaders make another tensor; a captured graph still reads the old one.
            setattr(made.module, made.key, made.tensor)
        _refuse_derived(model, parameters, before, recorder.written)
    except UnsupportedEngine:
        raise
    except Exception as error:  # the engine's loader may raise anything
        raise UnsupportedEngine(
            f"the engine's loader cannot be called again on the running model, so its weights "
            f"cannot be changed in place: {type(error).__name__}: {error}"
        ) from error
    return {name: tuple(recorder.boxes[name]) for name in checkpoint}


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

    def current(self) -> bool:
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


def _renewal(found: list[_Made]) -> Renewal:
    def renew() -> None:
        with torch.no_grad():
            for made in found:
                made.renew()

    def current() -> bool:
        with torch.no_grad():
            return all(made.current() for made in found)

    return Renewal(renew, current)


def _renewed(model: Loader) -> list[_Made]:
    """Tensors that are made of one weight each in a known way, which the live bits prove."""
    with torch.no_grad():
        return [made for made in _known(model) if made.current()]


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
        held.key in _KNOWN_DERIVED and held.value.numel() and _address(held.value) not in own
        for held in _tensors(_reachable(model)).values()
    )


def _followed(parameters: Mapping[str, torch.Tensor], renewed: Iterable[_Made]) -> set[int]:
    """Addresses of parameters, whose views follow them, and of what is renewed with them."""
    named = {id(one) for one in parameters.values()}
    own = {_address(one) for one in parameters.values()}
    return own | {_address(made.tensor) for made in renewed if id(made.weight) in named}


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


def _refuse_derived(
    model: Loader,
    parameters: Mapping[str, torch.Tensor],
    before: Mapping[str, _Held],
    written: set[int],
) -> None:
    """Refuse a model of which loading changed a tensor that is no parameter.

    Args:
        model: after its loader was called once more.
        parameters: its parameters; views of them follow them.
        before: what it held before.
        written: addresses of memory of before that the loader wrote to.

    Raises:
        UnsupportedEngine: names the tensor; what was there before is put back.
    """
    there = {_address(held.value) for held in _tensors(before).values()}
    # One that was made just now is right, but a captured graph reads the one before it.
    renewed = [made for made in _renewed(model) if _address(made.tensor) in there]
    own = _followed(parameters, renewed)
    changed = ""
    for path, held in _tensors(_reachable(model)).items():
        address = _address(held.value)
        if address in own or not held.value.numel():
            continue
        if address not in there or address in written or held.key in _KNOWN_DERIVED:
            changed = changed or path
    if not changed:
        return
    for held in before.values():
        # A captured graph still reads the memory of the old one.
        if isinstance(held.value, torch.Tensor | list | tuple | dict):
            held.put_back()
    raise UnsupportedEngine(
        f"the model keeps {changed!r}, which its loader makes from weights: it would stay old "
        "when they are changed in place, and tokens would be wrong under an attested version"
    )


def _tensors(held: Mapping[str, _Held]) -> dict[str, _Held]:
    """Those that are tensors with plain memory."""
    return {
        path: one
        for path, one in held.items()
        if isinstance(one.value, torch.Tensor) and one.value.layout is torch.strided
    }


@contextlib.contextmanager
def _in_this_thread() -> Iterator[None]:
    """Have what the loader gives to threads done here: a recorder sees its own thread alone."""
    ours, submit = threading.get_ident(), ThreadPoolExecutor.submit
    start = threading.Thread.start

    def submit_here(
        pool: ThreadPoolExecutor,
        work: Callable[..., Any],
        /,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Future[Any]:
        if threading.get_ident() != ours:
            return submit(pool, work, *args, **kwargs)
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # as an executor hands it on
            done.set_exception(error)
        return done

    def start_not(thread: threading.Thread) -> None:
        if threading.get_ident() != ours:
            start(thread)
            return
        raise UnsupportedEngine(f"the engine's loader copies in a thread of its own: {thread.name}")

    ThreadPoolExecutor.submit = submit_here  # type: ignore[method-assign,assignment]
    threading.Thread.start = start_not  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
        threading.Thread.start = start  # type: ignore[method-assign]


def _tensor(dtype: str, shape: tuple[int, ...], bits: np.ndarray) -> torch.Tensor:
    """A checkpoint tensor over the mapped file; nothing is copied."""
    if dtype not in _DTYPES:
        raise UnsupportedEngine(f"element type {dtype!r} of the checkpoint is not supported")
    width = number_format(dtype).width
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the map cannot be written; nobody does
        flat = torch.from_numpy(bits.view(f"i{width}" if width > 1 else "u1"))
    return flat.view(_DTYPES[dtype]).view(shape)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says no types
    """Writes copies into parameters down instead of carrying them out."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        sources: Mapping[str, torch.Tensor],
        watched: set[int],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Versions of tensors do not count what is written through ``.data``.
        self.written: set[int] = set()
        self._watched = watched
        self.boxes: dict[str, list[Box]] = defaultdict(list)
        self._sources = {_address(tensor): name for name, tensor in sources.items()}
        # What a loader has put together of several before it copies it, and kept alive.
        self._joined: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._targets: dict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for name, parameter in parameters.items():
            self._targets[_address(parameter)].append((name, parameter.detach()))

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  # an operator of torch
        types: Any,  # noqa: ANN401  # subclasses, of which there are none
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        target = self._target(func, args, kwargs or {})
        if target is None:
            if func is torch.ops.aten.cat.default and all(map(self._is_source, args[0])):
                return self._join(args[0], *args[1:])
            copied = func in _COPIES and self._is_source(args[0]) and _same_type(args[0], kwargs)
            return args[0] if copied else func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._copied(*target, args[0], args[1])
        elif func not in _FILLS:  # what a fill leaves must be zero: ``parameters`` looks
            raise UnsupportedEngine(f"the engine's loader computes {target[0]!r} with {func}")
        return args[0]

    def _target(
        self,
        func: Any,  # noqa: ANN401  # an operator of torch
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[str, torch.Tensor] | None:
        """The parameter that this operator writes to."""
        written: list[torch.Tensor] = []
        for number, argument in enumerate(func._schema.arguments):  # noqa: SLF001
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            # ``out=`` comes by name, and ``_foreach_copy_`` writes to a list.
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            several = value if isinstance(value, list | tuple) else (value,)
            written += [one for one in several if isinstance(one, torch.Tensor)]
        self.written |= self._watched & {_address(tensor) for tensor in written}
        for tensor in written:
            for name, parameter in self._targets.get(_address(tensor), ()):
                first = tensor.storage_offset() - parameter.storage_offset()
                if 0 <= first < parameter.numel():
                    return name, parameter
        return None

    def _join(self, parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """Parts one below the other (MLA's ``q_a`` and ``kv_a``); others are computed."""
        whole = torch.cat(parts, dim)
        if dim == 0 and len({part.dtype for part in parts}) == 1:
            self._joined[_address(whole)] = whole, list(parts)
        return whole

    def _is_source(self, tensor: torch.Tensor) -> bool:
        return _address(tensor) in self._sources

    def _copied(
        self, name: str, parameter: torch.Tensor, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        whole, parts = self._joined.get(_address(source), (None, []))
        if whole is not None and source.shape == whole.shape == target.shape:
            first = 0
            for part in parts:
                self._copied(name, parameter, target[first : first + part.shape[0]], part)
                first += part.shape[0]
            return
        origin = self._sources.get(_address(source))
        if origin is None:
            raise UnsupportedEngine(f"the engine's loader computes what it copies into {name!r}")
        # BF16 is the upper half of a 32-bit float, so its bits stay what they are.
        wider = (source.dtype, target.dtype) == (torch.bfloat16, torch.float32)
        if target.dtype != parameter.dtype or (source.dtype != target.dtype and not wider):
            raise UnsupportedEngine(
                f"the engine's loader converts {origin!r} from {source.dtype} to {target.dtype}"
            )
        if source.shape != target.shape:
            source = source.expand(target.shape)
        self.boxes[origin] += boxes_of(
            name,
            target.shape,
            (int(source.storage_offset()), source.stride()),
            (int(target.storage_offset() - parameter.storage_offset()), target.stride()),
        )


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same_type(tensor: torch.Tensor, kwargs: dict[str, Any] | None) -> bool:
    return (kwargs or {}).get("dtype") in {None, tensor.dtype}


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
