"""Whether a chat template shows each message by itself: then no word far away changes what follows.

Read off the template's syntax, so that it holds for every conversation. A template is *local* when
what it writes for a message follows from that message, the ones beside it, the very first and the
very last one, and from what is no message (tools, variables, the date). Then what stands behind an
answer is the same whatever stood between the first message and the round before it.

| of ``messages``, or a rest of them (``messages[1:]``) | is |
|---|---|
| ``for message in messages``, outside of other loops and macros | local |
| ``messages[0]``, ``messages[-1]`` | local |
| in that loop ``messages[loop.index0 + 1]`` or ``- 1``, ``loop.previtem``, ``.nextitem`` | local |
| ``loop.first``, ``loop.last``, ``loop.index0 == 0`` | local |
| anything else: their number, a filter over them, ``loop.index`` by itself | not |
| what outlives a message: a namespace set in the loop or a macro, ``cycler``, ``break`` | not |
| what is used up, made outside of the loop and kept: ``range(9) | batch(1)``, a ``map`` | not |

What no rule knows makes a template not local, which costs time and nothing else.
Next step: ``tokenization`` leaves out what such a template cannot see.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.visitor import NodeVisitor

_REFUSED = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block, nodes.Break)
_OUTLIVE = frozenset({"cycler", "joiner"})
ITERATORS = frozenset(
    {"batch", "items", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"}
    | {"unique"}
)
"""Filters whose result is used up as it is read: what one message took, the next does not see."""
_READ_WHOLE = frozenset({"count", "join", "length", "list", "max", "min", "sort", "sum"})
"""Filters that read all of what they are given, at once."""
_OF_LOOP = frozenset({"first", "last", "previtem", "nextitem"})
_BESIDE = 1


def is_local(template: nodes.Template) -> bool:
    """Whether the template is, by the rules above.

    Args:
        template: as jinja's parser made it, before anything was put in.
    """
    reading = _Reading(_rests(template))
    reading.visit(template)
    return reading.local


def _rests(template: nodes.Template) -> dict[str, bool]:
    """Names of the messages and of rests of them; true: the first entry is the first message.

    A name that is given anything else somewhere is refused where it is used as a list: then it
    stands in ``_Reading`` as an assignment that no rule knows.
    """
    names = {"messages": True}
    more = True
    while more:
        more = False
        for one in template.find_all(nodes.Assign):
            whole = _rest(one.node, names)
            if whole is None or not isinstance(one.target, nodes.Name):
                continue
            known = names.get(one.target.name)
            new = whole and known is not False
            if known != new:
                names[one.target.name], more = new, True
    return names


def _rest(value: nodes.Node, names: dict[str, bool]) -> bool | None:
    """Whether a value is the messages (true), a rest of them (false) or neither (None)."""
    if isinstance(value, nodes.Name):
        return names.get(value.name)
    if not isinstance(value, nodes.Getitem) or not isinstance(value.node, nodes.Name):
        return None
    cut, name = value.arg, value.node.name
    if not names.get(name) or not isinstance(cut, nodes.Slice):
        return None  # a rest of a rest leaves out more than the first message
    begins = isinstance(cut.start, nodes.Const) and cut.start.value in {0, 1}
    return False if begins and cut.stop is None and cut.step is None else None


def _makes_values(node: nodes.Filter) -> bool:
    """Whether no entry of its result is an iterator: only ``map`` applies a filter to each."""
    if node.name != "map" or not node.args:
        return node.dyn_args is None
    which = node.args[0]
    return isinstance(which, nodes.Const) and which.value not in ITERATORS | {
        "attr",
        "default",
        "d",
    }


class _Reading(NodeVisitor):
    """Looks at every node once.

    Attributes:
        local: nothing was found that is not.
    """

    def __init__(self, lists: dict[str, bool]) -> None:
        self.local = True
        self._lists = lists
        self._inside = ""  # "messages": their loop; "other": a loop or macro that is not theirs
        self._within = False  # the loop of the messages, also where another is inside it
        self._read: set[int] = set()  # filters whose result is read whole where it is made

    def generic_visit(self, node: nodes.Node) -> None:
        """Whatever no rule names is as local as its parts."""
        self.local &= not isinstance(node, _REFUSED)
        super().generic_visit(node)

    def visit_Name(self, node: nodes.Name) -> None:  # noqa: N802  # jinja's
        """A list of messages by itself: something is made of all of them."""
        self.local &= node.name not in self._lists and node.name not in _OUTLIVE
        self.local &= node.name != "loop" or self._inside == "other"

    def visit_Filter(self, node: nodes.Filter) -> None:  # noqa: N802
        """An iterator that is kept from before the loop: one message leaves less to the next."""
        if node.name in ITERATORS:
            read = self._within or id(node) in self._read
            self.local &= read and (self._within or _makes_values(node))
        if node.node is not None and (node.name in _READ_WHOLE or id(node) in self._read):
            self._read.add(id(node.node))
        super().generic_visit(node)

    def visit_NSRef(self, _: nodes.NSRef) -> None:  # noqa: N802
        """``set ns.name = ...``: what is set for one message is there at the next."""
        self.local &= not self._within

    def visit_Assign(self, node: nodes.Assign) -> None:  # noqa: N802
        """A name for a rest, or for anything local."""
        target, rest = node.target, _rest(node.node, self._lists)
        if isinstance(target, nodes.Name) and target.name in self._lists:
            # A list gets another value than a rest, or a name is a list for some messages only.
            self.local &= rest is not None and not self._within and target.name != "messages"
            return
        self.visit(target)
        self.visit(node.node)

    def visit_For(self, node: nodes.For) -> None:  # noqa: N802
        """A loop over messages, or over something of one of them."""
        of_all = _rest(node.iter, self._lists) is not None
        if of_all:
            self.local &= not self._inside and node.test is None and not node.recursive
        else:
            self._read.add(id(node.iter))
            self.visit(node.iter)
        targets = {
            one.name
            for one in [node.target, *node.target.find_all(nodes.Name)]
            if isinstance(one, nodes.Name)
        }
        self.local &= not targets & self._lists.keys()
        before = self._inside, self._within
        self._inside = "messages" if of_all else "other"
        self._within = self._within or of_all
        for part in ([node.test] if node.test is not None else []) + node.body:
            self.visit(part)
        self._inside, self._within = before
        for part in node.else_:
            self.visit(part)

    def visit_Macro(self, node: nodes.Macro) -> None:  # noqa: N802
        """A macro may be called anywhere, for every message too."""
        before = self._inside, self._within
        self._inside, self._within = "other", True
        super().generic_visit(node)
        self._inside, self._within = before

    visit_CallBlock = visit_Macro  # noqa: N815

    def visit_Getattr(self, node: nodes.Getattr) -> None:  # noqa: N802
        """``loop.first``."""
        if not self._is_loop(node.node):
            super().generic_visit(node)
            return
        self.local &= node.attr in _OF_LOOP

    def visit_Compare(self, node: nodes.Compare) -> None:  # noqa: N802
        """``loop.index0 == 0`` is ``loop.first``."""
        firsts = {"index0": 0, "index": 1}
        one, ops = node.expr, node.ops
        if isinstance(one, nodes.Getattr) and self._is_loop(one.node) and one.attr in firsts:
            same = len(ops) == 1 and ops[0].op in {"eq", "ne"}
            to = ops[0].expr
            self.local &= same and isinstance(to, nodes.Const) and to.value == firsts[one.attr]
            return
        super().generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> None:  # noqa: N802
        """``messages[0]``, ``messages[loop.index0 + 1]``."""
        if not isinstance(node.node, nodes.Name) or node.node.name not in self._lists:
            super().generic_visit(node)
            return
        which = node.arg
        first = isinstance(which, nodes.Const) and which.value == 0
        last = isinstance(which, nodes.Neg) and which.node == nodes.Const(1)
        last |= isinstance(which, nodes.Const) and which.value == -1
        self.local &= (first and self._lists[node.node.name]) or last or self._is_beside(which)

    def _is_beside(self, which: nodes.Node) -> bool:
        """``loop.index0``, one more or one less, of the loop over the messages."""
        if isinstance(which, nodes.Add | nodes.Sub):
            by = which.right
            if not isinstance(by, nodes.Const) or by.value not in range(_BESIDE + 1):
                return False
            which = which.left
        of_loop = isinstance(which, nodes.Getattr) and self._is_loop(which.node)
        return of_loop and isinstance(which, nodes.Getattr) and which.attr == "index0"

    def _is_loop(self, node: nodes.Node) -> bool:
        """Whether it is the loop over the messages, and not one inside it."""
        is_named = isinstance(node, nodes.Name) and node.name == "loop"
        return is_named and self._inside == "messages"
