"""What an engine's loader computes, written down while it computes, to be computed again.

A loader may do more than copy: ``A = -exp(A_log)``, a conversion that rounds, a projection cut in
halves and kept under other names. Its operations on checkpoint tensors are written down as a
``Trace``: which operator of torch, on which views of which memory. From that, what was made can be
made again from other elements, into the same memory, without the loader.
Whatever is not surely a function of the checkpoint is refused: a loader that looks at values, mixes
in tensors of unknown origin, or leaves a part as it was.
Next step: ``layout`` has the loader watched and says of what is copied where it lies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from rose_engines.errors import UnsupportedEngine

aten = torch.ops.aten
_EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# What they give depends on nothing, so it may be mixed with what comes from the checkpoint.
_FACTORIES = _EMPTY | {
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
}
_NUMBER = aten._local_scalar_dense.default  # noqa: SLF001
# A mask takes as many elements as it has set; places do not.
_BY_INDEX, _MASKS = aten.index.Tensor, {torch.bool, torch.uint8}
# Every device gives these bits; an exponential differs between a CPU and a GPU.
_SAME_EVERYWHERE = _FACTORIES | {
    aten.copy_.default,
    aten._to_copy.default,  # noqa: SLF001
    aten.clone.default,
    aten.cat.default,
    aten.stack.default,
    aten.neg.default,
}
# What a tensor tells without an operator that could be written down.
_LOOKS = ("numpy", "tolist", "__array__", "__dlpack__")
# Memory that is not written before it is read shows in what is made: one of these differs.
_FILLS = (0x00, 0x5A)


def address(tensor: torch.Tensor) -> int:
    """Which memory a tensor is a view of; tensors on ``meta`` and empty ones have theirs too."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata  # noqa: SLF001  # the storage's own identity


class View(NamedTuple):
    """A tensor as a view of numbered memory."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same view of other memory."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Step(NamedTuple):
    """An operator that was called.

    Attributes:
        func, arguments: it, with a ``View`` in the place of each tensor.
        read: memory of its arguments.
        changed: memory that it wrote to, or made.
        made: number of the memory of each output, None = no new memory.
        devices: types of those where it ran.
    """

    func: Any
    arguments: Any
    read: frozenset[int]
    changed: frozenset[int]
    made: tuple[int | None, ...]
    devices: frozenset[str]


class Making(NamedTuple):
    """How a tensor is made.

    Attributes:
        view: it, in the memory that the steps fill.
        steps: what to do.
        leaves: memory that has to be given.
        sizes: bytes of what the steps write to or make.
    """

    view: View
    steps: tuple[Step, ...]
    leaves: frozenset[int]
    sizes: Mapping[int, int]

    def make(
        self, given: Mapping[int, torch.UntypedStorage], device: torch.device, fill: int = 0
    ) -> torch.Tensor:
        """Make it from what is given, in memory of its own.

        Args:
            given: memory of the leaves.
            device: where.
            fill: byte in memory that nothing was written to.

        Raises:
            UnsupportedEngine: a step makes something of another size than it did.
        """
        memory = dict(given)

        def storage(number: int) -> torch.UntypedStorage:
            if number not in memory:
                raw = torch.full((self.sizes[number],), fill, dtype=torch.uint8, device=device)
                memory[number] = raw.untyped_storage()
            return memory[number]

        def there(one: Any) -> Any:  # noqa: ANN401  # whatever operators take
            if isinstance(one, View):
                return one.of(storage(one.memory))
            return device if isinstance(one, torch.device) else one

        for step in self.steps:  # one that was not carried out has no outputs
            args, kwargs = pytree.tree_map(there, step.arguments, is_leaf=_is_view)
            result = step.func(*args, **kwargs)
            made = zip(step.made, _outputs(result), strict=False)
            for number, one in ((number, one) for number, one in made if number is not None):
                raw = memory[number] = one.untyped_storage()
                if raw.nbytes() != self.sizes[number]:
                    message = f"{step.func} made {raw.nbytes()} bytes, not {self.sizes[number]}"
                    raise UnsupportedEngine(message)
                if step.func in _EMPTY:
                    torch.empty(0, dtype=torch.uint8, device=raw.device).set_(raw).fill_(fill)
        return self.view.of(storage(self.view.memory))

    def differs_on(self, device: str) -> Any:  # noqa: ANN401  # an operator of torch, or None
        """A step that ran on a device of another type, and may give other bits on this one."""
        for step in self.steps:
            if step.devices - {device, "meta"} and step.func not in _SAME_EVERYWHERE:
                return step.func
        return None


def _is_view(one: Any) -> bool:  # noqa: ANN401
    return isinstance(one, View)


def _by_values(func: Any, arguments: Any) -> bool:  # noqa: ANN401
    """Whether values decide how much an operator gives: its views would be those of other ones."""
    if func is _BY_INDEX:
        return any(one.dtype in _MASKS for one in tensors_of(arguments[0][1]))
    return torch.Tag.dynamic_output_shape in func.tags


def _outputs(result: Any) -> list[torch.Tensor]:  # noqa: ANN401
    several = result if isinstance(result, list | tuple) else (result,)
    return [one for one in several if isinstance(one, torch.Tensor)]


def tensors_of(tree: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """The tensors among an operator's arguments."""
    return [one for one in pytree.tree_leaves(tree) if isinstance(one, torch.Tensor)]


class Trace:
    """Operators that were called on checkpoint tensors, parameters and what was made of them.

    Args:
        sources: checkpoint tensors by name.
        parameters: the model's by name.
        limit: bytes that may be made; beyond, nothing is written down any more.
    """

    def __init__(
        self,
        sources: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        limit: int,
    ) -> None:
        self.steps: list[Step] = []
        self.sources: dict[int, str] = {}
        self.parameters: dict[int, list[str]] = {}
        # Why nothing can be made again, and whether something may depend on values.
        self.lost = ""
        self.values_were_read = False
        self._unknown: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._left = limit
        # Whose value the loader holds as a number and has not put anywhere yet.
        self._given: torch.Tensor | None = None
        self._giving = False
        self._numbers: dict[int, int] = {}
        # Memory that is given back would be taken again, under the same address.
        self._alive: list[torch.UntypedStorage] = []
        for name, tensor in sources.items():
            self.sources[self._number(tensor)] = name
        for name, tensor in parameters.items():
            self.parameters.setdefault(self._number(tensor), []).append(name)

    def _number(self, tensor: torch.Tensor) -> int:
        found = self._numbers.get(address(tensor))
        if found is None:
            storage = tensor.untyped_storage()
            found = self._numbers[address(tensor)] = len(self._alive)
            self._alive.append(storage)
            self._sizes[found] = storage.nbytes()
        return found

    def view(self, tensor: torch.Tensor) -> View | None:
        """A tensor of which it is known how it came about, so far as ``making`` can tell."""
        number = self._numbers.get(address(tensor))
        if number is None:
            return None
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        return View(number, tensor.dtype, size, stride, int(tensor.storage_offset()))

    def give(self, tensor: torch.Tensor) -> Any:  # noqa: ANN401  # what ``item`` gives
        """The value of a tensor, on its way into another one."""
        if address(tensor) not in self._numbers or not tensor.is_floating_point():
            return _item(tensor)  # an integer may choose between tensors: ``note`` sees it
        self.take()
        self._given, self._giving = tensor, True
        try:
            return _Value(_item(tensor)).on_its_way(tensor, self)
        finally:
            self._giving = False

    def take(self, tensor: torch.Tensor | None = None) -> None:
        """What was given arrives as it is; if it is another's, something was made of it."""
        if self._given is not None and self._given is not tensor:
            self.note_read(self._given)
        self._given = None

    def note_read(self, tensor: torch.Tensor) -> None:
        """The loader looks at values, so what it does may depend on them."""
        if address(tensor) in self._numbers:
            self.values_were_read = True
            self.lost = self.lost or "the loader looks at values of the checkpoint"

    def note(
        self,
        func: Any,  # noqa: ANN401  # an operator of torch
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        result: Any,  # noqa: ANN401
        written: Sequence[torch.Tensor],
    ) -> None:
        """Write an operator down that was called, or would have been.

        Args:
            func: it.
            arguments: by place and by name.
            result: what it gave; None where it was not carried out and only writes.
            written: those of its arguments that it writes to.
        """
        if self._giving:
            return
        if func is not _NUMBER:
            self.take()
        outputs = [] if result is None else _outputs(result)
        if (result is not None and not outputs and not written) or _by_values(func, arguments):
            for one in tensors_of(arguments):
                self.note_read(one)
            return
        if self.lost or not self._follows(func, tensors_of(arguments), written):
            return
        changed = {self._number(one) for one in written}
        made = tuple(self._new(one) for one in outputs)
        changed.update(number for number in made if number is not None)
        if not changed:
            return  # a view
        if self._left < 0:
            self._forget()
            return
        views = pytree.tree_map_only(torch.Tensor, self.view, arguments)
        read = frozenset(self._number(one) for one in tensors_of(arguments))
        devices = frozenset(one.device.type for one in (*tensors_of(arguments), *outputs))
        self.steps.append(Step(func, views, read, frozenset(changed), made, devices))

    def _new(self, one: torch.Tensor) -> int | None:
        """Number an output's memory, and count it; None = it is a view of what is known."""
        if address(one) in self._numbers:
            return None
        self._left -= one.untyped_storage().nbytes()
        return self._number(one)

    def _follows(
        self,
        func: Any,  # noqa: ANN401  # an operator of torch
        given: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
    ) -> bool:
        """Whether what an operator gives follows from what is known, and is of interest."""
        into = {address(one) for one in written}
        unknown = {address(one) for one in given} - self._numbers.keys()
        if len(unknown) == len({address(one) for one in given}):
            return func in _FACTORIES
        if unknown - into or torch.Tag.nondeterministic_seeded in func.tags:
            self._unknown |= {self._numbers[one] for one in into & self._numbers.keys()}
            return False
        return True

    def _forget(self) -> None:
        self.lost = "the loader makes too much for it to be made again"
        self.steps.clear()
        self._alive.clear()

    def making(self, tensor: torch.Tensor, plain: Iterable[int]) -> Making | str:
        """How a tensor was made.

        Args:
            tensor: as the loader left it.
            plain: memory of parameters that are read as they are.

        Returns:
            The steps, or why they are not known.
        """
        view = self.view(tensor)
        if self.lost or view is None:
            return self.lost or "it is made of something else than the checkpoint"
        leaves = self.sources.keys() | set(plain)
        needed, steps = {view.memory}, list[Step]()
        for step in reversed(self.steps):
            if step.changed & (needed - leaves):
                steps.append(step)
                needed |= step.read
        if needed & self._unknown:
            return "something else than the checkpoint is mixed in"
        made = {number for step in steps for number in step.made if number is not None}
        sizes = {number: self._sizes[number] for number in (needed | made) - leaves}
        steps.reverse()
        return Making(view, tuple(steps), frozenset(needed & leaves), sizes)


_item, _fill_ = torch.Tensor.item, torch.Tensor.fill_


class _Value(float):
    """The value of a tensor on its way into another one: so SGLang and vLLM load scalars.

    Put there by ``fill_`` it is a copy. Whatever else is done with it depends on it.
    """

    tensor: torch.Tensor
    seen = False
    _trace: Trace

    def on_its_way(self, tensor: torch.Tensor, trace: Trace) -> _Value:
        self.tensor, self._trace = tensor, trace
        return self

    def filled(self, target: torch.Tensor) -> torch.Tensor:
        """Put it into a tensor of one element; as a plain number, once it was looked at."""
        if self.seen:
            return _fill_(target, float.__float__(self))
        self._trace.take(self.tensor)
        return target.copy_(self.tensor.view(target.shape))


def _looked(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def looked(value: _Value, *args: Any) -> Any:  # noqa: ANN401
        value.seen = True
        value._trace.note_read(value.tensor)  # noqa: SLF001
        return plain(value, *args)

    return looked


_SHOWN = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__repr__"}
for _name in {"__str__", "__format__", *_SHOWN} | (set(dir(float)) - set(dir(object))):
    if callable(getattr(float, _name)):
        setattr(_Value, _name, _looked(_name))


@contextlib.contextmanager
def watching_reads(trace: Trace) -> Iterator[None]:
    """Have the trace hear of values that are read without an operator."""
    before = {name: getattr(torch.Tensor, name) for name in _LOOKS}

    def watched(read: Callable[..., Any]) -> Callable[..., Any]:
        def look(tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            trace.note_read(tensor)
            return read(tensor, *args, **kwargs)

        return look

    def item(tensor: torch.Tensor) -> Any:  # noqa: ANN401
        return trace.give(tensor)

    def fill_(tensor: torch.Tensor, value: Any) -> torch.Tensor:  # noqa: ANN401
        if isinstance(value, _Value) and tensor.numel() == 1:
            return value.filled(tensor)
        return _fill_(tensor, value)

    for name, read in before.items():
        setattr(torch.Tensor, name, watched(read))
    torch.Tensor.item, torch.Tensor.fill_ = item, fill_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.item, torch.Tensor.fill_ = _item, _fill_  # type: ignore[method-assign]
        for name, read in before.items():
            setattr(torch.Tensor, name, read)


@dataclass(frozen=True)
class Made:
    """A tensor of the running engine, and how it is made.

    Attributes:
        path: where it hangs.
        tensor: it; it stays at this address.
        making: the steps.
        given: memory of its leaves: checkpoint tensors that are kept, and parameters.
    """

    path: str
    tensor: torch.Tensor
    making: Making
    given: Mapping[int, torch.UntypedStorage]

    def _made(self, fill: int = 0) -> torch.Tensor:
        return self.making.make(self.given, self.tensor.device, fill)

    def renew(self) -> None:
        """Make it anew, in place."""
        self.tensor.copy_(self._made())

    def is_current(self) -> bool:
        """Whether it is what would be made now, to the bit."""
        try:
            return same_bits(self._made(), self.tensor)
        except UnsupportedEngine:
            return False

    def prove(self) -> None:
        """Hold what the steps make to what the engine has.

        Raises:
            UnsupportedEngine: they make something else, or not all of it.
        """
        if step := self.making.differs_on(self.tensor.device.type):
            raise UnsupportedEngine(
                f"the engine's loader computes {self.path!r} with {step} on another device than "
                f"{self.tensor.device}, where it may give other bits"
            )
        try:
            with torch.no_grad():
                if all(same_bits(self._made(fill), self.tensor) for fill in _FILLS):
                    self.renew()  # the same bits: whether it can be written at all
                    return
        except RuntimeError as error:  # whatever an operator says of other devices or sizes
            raise UnsupportedEngine(
                f"the engine's loader computes {self.path!r}, which cannot be done again: {error}"
            ) from error
        raise UnsupportedEngine(
            f"the engine's loader computes {self.path!r}, and what it does makes something else "
            "when it is done again"
        )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same to the bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    sides = (side.detach().contiguous().view(-1).view(torch.uint8) for side in (one, other))
    return torch.equal(*sides)
