"""A loader's copies, written down instead of carried out, and what else it does.

Next step: ``layout`` says of what was seen where each checkpoint tensor lies.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors.made import Trace, address
from rose_engines.tensors.slices import Box, boxes_of

_FILLS = {
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
}
# Copies that a loader makes of what it was given: the original is as good.
_COPIES = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}  # noqa: SLF001
# What may be kept of the checkpoint beside the engine: an eighth of its weights. Loaders compute
# small tensors (decays of state spaces, routers) and parts of latent attention.
KEPT_PART = 8


@contextlib.contextmanager
def in_this_thread() -> Iterator[None]:
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


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says no types
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
        # The same by parameter.
        self._placed: dict[str, list[Box]] = defaultdict(list)
        self.targets = {name: one.detach() for name, one in parameters.items()}
        # Parameters that are not only copied into, and what the loader does with them.
        self.computed: dict[str, str] = {}
        most = sum(one.nbytes for one in parameters.values()) // KEPT_PART
        self.trace = Trace(sources, parameters, most)
        self._sources = {address(tensor): name for name, tensor in sources.items()}
        # What a loader has put together of several before it copies it, and kept alive.
        self._joined: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        # What it has copied in another order, with the view that it copied.
        self._rearranged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._by_address: dict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for name, parameter in self.targets.items():
            self._by_address[address(parameter)].append((name, parameter))

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  # an operator of torch
        types: Any,  # noqa: ANN401  # subclasses, of which there are none
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        self.written |= self._watched & {address(tensor) for tensor in written}
        target = self._target(written)
        for tensor in written:  # no longer what it was put together of
            self._joined.pop(address(tensor), None)
            self._rearranged.pop(address(tensor), None)
        if target is None:
            if func is torch.ops.aten.cat.default and all(map(self._is_source, args[0])):
                result = self._join(args[0], *args[1:])
            elif func in _COPIES and self._is_source(args[0]) and _same_type(args[0], kwargs):
                if args[0].is_contiguous():
                    return args[0]
                result = func(*args, **kwargs)
                self._rearranged[address(result)] = result, args[0]
            else:
                result = func(*args, **kwargs)
            self.trace.note(func, (args, kwargs), result, written)
            return result
        self.trace.note(func, (args, kwargs), None, written)
        if func is torch.ops.aten.copy_.default:
            self._copied(*target, args[0], args[1])
        elif func in _FILLS:  # what a fill leaves must be zero: ``parameters`` looks
            if self._is_placed(*target, written[0]):
                self._computes(target[0], f"fills what it has copied into {target[0]!r}")
        else:
            self._computes(target[0], f"computes {target[0]!r} with {func}")
        return written[0] if func._schema.returns else None  # noqa: SLF001

    def _is_placed(self, name: str, parameter: torch.Tensor, filled: torch.Tensor) -> bool:
        """Whether a fill writes over something that was copied."""
        placed = self._placed[name]
        if not placed or not filled.numel():
            return False
        if filled.dtype != parameter.dtype or not parameter.is_contiguous():
            return True  # its places are not those of the boxes
        first = int(filled.storage_offset() - parameter.storage_offset())
        sides = zip(filled.shape, filled.stride(), strict=True)
        end = first + sum((size - 1) * apart for size, apart in sides) + 1
        if end > parameter.numel():
            return True
        near = [one for one in placed if one.target_first < end and first < one.target_end]
        if not near:
            return False
        over = np.zeros(parameter.numel(), np.bool_)
        np.lib.stride_tricks.as_strided(over[first:], filled.shape, filled.stride())[...] = True
        return any(
            np.lib.stride_tricks.as_strided(
                over[box.target_first :],
                (box.rows, box.columns),
                (box.target_stride, box.target_step),
            ).any()
            for box in near
        )

    def _computes(self, name: str, what: str) -> None:
        self.computed.setdefault(name, what)

    def _target(self, written: list[torch.Tensor]) -> tuple[str, torch.Tensor] | None:
        """The parameter that an operator writes to.

        Raises:
            UnsupportedEngine: it writes to what it was given to load.
        """
        for tensor in written:
            if (origin := self._sources.get(address(tensor))) is not None:
                raise UnsupportedEngine(f"the engine's loader writes to {origin!r}, which it loads")
            for name, parameter in self._by_address.get(address(tensor), ()):
                first = tensor.storage_offset() - parameter.storage_offset()
                if 0 <= first < parameter.numel():
                    return name, parameter
        return None

    def _join(self, parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """Parts one below the other (MLA's ``q_a`` and ``kv_a``); others are computed."""
        whole = torch.cat(parts, dim)
        if dim == 0 and len({part.dtype for part in parts}) == 1:
            self._joined[address(whole)] = whole, list(parts)
        return whole

    def _is_source(self, tensor: torch.Tensor) -> bool:
        return address(tensor) in self._sources

    def _reordered(
        self, source: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What a copy of something reordered copies of the checkpoint, and where it goes.

        Only entries of the first dimension as a whole, one behind the other on both sides.
        """
        if address(source) not in self._rearranged:
            return None
        whole, view = self._rearranged[address(source)]
        each = view[0].numel()
        first = int(source.storage_offset() - whole.storage_offset())
        in_order = all(one.is_contiguous() for one in (whole, source, target))
        if not in_order or first % each or source.numel() % each:
            return None
        part = view[first // each : (first + source.numel()) // each]
        return (part, target.view(part.shape)) if part.numel() == target.numel() else None

    def _copied(
        self, name: str, parameter: torch.Tensor, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        whole, parts = self._joined.get(address(source), (None, []))
        if whole is not None and source.shape == whole.shape == target.shape:
            first = 0
            for part in parts:
                self._copied(name, parameter, target[first : first + part.shape[0]], part)
                first += part.shape[0]
            return
        if (reordered := self._reordered(source, target)) is not None:
            source, target = reordered
        origin = self._sources.get(address(source))
        if origin is None:
            self._computes(name, f"computes what it copies into {name!r}")
            return
        # BF16 is the upper half of a 32-bit float, so its bits stay what they are.
        wider = (source.dtype, target.dtype) == (torch.bfloat16, torch.float32)
        if target.dtype != parameter.dtype or (source.dtype != target.dtype and not wider):
            what = f"converts {origin!r} from {source.dtype} to {target.dtype} in {name!r}"
            self._computes(name, what)
            return
        if source.shape != target.shape:
            source = source.expand(target.shape)
        try:
            found = boxes_of(
                name,
                target.shape,
                (int(source.storage_offset()), source.stride()),
                (int(target.storage_offset() - parameter.storage_offset()), target.stride()),
            )
            placed = list(found)
        except UnsupportedEngine:
            self._computes(name, f"spreads or repeats what it loads into {name!r}")
            return
        self.boxes[origin] += placed
        self._placed[name] += placed


def _written(
    func: Any,  # noqa: ANN401  # an operator of torch
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> list[torch.Tensor]:
    """Those of its arguments that an operator writes to."""
    written: list[torch.Tensor] = []
    for number, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        # ``out=`` comes by name, and ``_foreach_copy_`` writes to a list.
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        several = value if isinstance(value, list | tuple) else (value,)
        written += [one for one in several if isinstance(one, torch.Tensor)]
    return written


def _same_type(tensor: torch.Tensor, kwargs: dict[str, Any] | None) -> bool:
    return (kwargs or {}).get("dtype") in {None, tensor.dtype}
