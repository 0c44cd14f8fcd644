"""Evaluation of untrusted pickles: a restricted machine that imports nothing, calls nothing, and has limits."""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from snapshot.errors import CorruptSnapshotError, SnapshotError, UnsafeObjectError, UnsupportedFormatError
from snapshot.formats.pickle_nodes import (
    LimitError,
    Name,
    Node,
    NotKnownError,
    StandIn,
    Work,
    find_name,
    find_storage,
    join_fields,
    show_value,
)

# Limits of an evaluation, in proportion to the bytes that are stored of a pickle.

FREE = 64 << 20
"""Bytes of memory allowed for any pickle, with PER_BYTE more for each of its bytes."""
PER_BYTE = 32
INFLATED = 256 << 10
"""Bytes that any compressed pickle may have, with MOST_TIMES more for each stored byte.
Pickles of state dicts and optimizers compress about fivefold."""
MOST_TIMES = 32
FEW = 200_000
"""Values that may be copied or hashed for any pickle, with FACTOR more for each of its bytes."""
FACTOR = 4
MOST_NAMES = 10_000
"""Maximum number of classes and functions that one pickle may name."""
RUN = 64 << 10
"""Bytes of a pickle that are evaluated between two looks at the limits."""


class PickleLimits(msgspec.Struct, frozen=True):
    """Limits of one evaluation."""

    memory: int
    """Maximum number of bytes of the created objects, approximately."""
    steps: int
    """Maximum number of values that are copied or hashed."""
    opcodes: bytes = bytes(range(256))
    """Table of all opcodes, with zeros for those that the pickle may not have."""

    @staticmethod
    def of(length: int, opcodes: bytes = bytes(range(256))) -> PickleLimits:
        """Return the limits of a pickle of some length; see `expect_stored`."""
        return PickleLimits(FREE + PER_BYTE * length, FEW + FACTOR * length, opcodes)


def expect_stored(length: int, stored: int, what: str) -> int:
    """Raise ValueError if a pickle is too long for the `stored` bytes that it was decompressed from.

    Return the length that limits on memory and time are based on.
    """
    if length > INFLATED + MOST_TIMES * stored:
        raise ValueError(f"{what} inflates too far: from {stored:,} stored bytes to {length:,}; store it uncompressed")
    return min(length, MOST_TIMES // 2 * stored)


class InvalidPickleError(CorruptSnapshotError):
    """The bytes are within all limits, but are not a pickle of any value."""


class UnknownClassError(UnsupportedFormatError):
    """A pickle does something with a class that this reader does not know."""


# The machine. A pickle is a program for a stack; each opcode pushes, pops or changes values.


_ABSENT: Any = object()
"""Placeholder in the memo for a place that was not filled."""
_KEYWORDS = {0x4E: None, 0x88: True, 0x89: False}
_TEXTS: dict[int, tuple[struct.Struct, str]] = {
    0x58: (struct.Struct("<I"), "text"),  # BINUNICODE
    0x8C: (struct.Struct("<B"), "text"),  # SHORT_BINUNICODE
    0x8D: (struct.Struct("<Q"), "text"),  # BINUNICODE8
    0x42: (struct.Struct("<I"), "bytes"),  # BINBYTES
    0x43: (struct.Struct("<B"), "bytes"),  # SHORT_BINBYTES
    0x8E: (struct.Struct("<Q"), "bytes"),  # BINBYTES8
    0x54: (struct.Struct("<I"), "ascii"),  # BINSTRING
    0x55: (struct.Struct("<B"), "ascii"),  # SHORT_BINSTRING
    0x8A: (struct.Struct("<B"), "int"),  # LONG1
    0x8B: (struct.Struct("<I"), "int"),  # LONG4
}
"""Opcodes with a length and as many bytes."""
_read_uint = struct.Struct("<I").unpack_from
_read_int = struct.Struct("<i").unpack_from
_read_short = struct.Struct("<H").unpack_from
_read_long = struct.Struct("<Q").unpack_from
_read_float = struct.Struct(">d").unpack_from


def evaluate_pickle(
    data: bytes,
    where: object,
    limits: PickleLimits | None = None,
    persistent: Callable[[Any], Node] = find_storage,
    names: Callable[[str, str], Node] = find_name,
) -> Node:
    """Return the contents of a pickle: containers, numbers, texts, bytes, and stand-ins for all other objects.

    Args:
        data: The pickle; bytes after its end are ignored.
        where: Place of the pickle, for messages.
        limits: Limits on memory and time; by default, those of the pickle's length.
        persistent: Function that returns the node of a reference to an object outside the pickle.
        names: Function that returns the node of a class or function, from its module and name.

    Raises:
        UnsafeObjectError: The pickle has opcodes that checkpoints do not need.
        UnsupportedFormatError: The pickle does something with a class that this reader does not know.
        CorruptSnapshotError: The data is not a pickle, or is a malicious one.
    """
    machine = _Machine(data, where, limits or PickleLimits.of(len(data)), persistent, names)
    try:
        return machine.run()
    except SnapshotError:
        raise
    except LimitError as error:
        raise CorruptSnapshotError(f"{where}: {error}") from error
    except NotKnownError as error:
        raise UnknownClassError(f"{where}: the pickle has {error}, which cannot be read") from error
    except Exception as error:  # a foreign pickle may cause anything
        raise InvalidPickleError(f"{where}: cannot read the pickle: {type(error).__name__}: {error}") from error


class _Machine:
    """One evaluation: the pickle, its limits, and the names that it has used."""

    def __init__(
        self,
        data: bytes,
        where: object,
        limits: PickleLimits,
        persistent: Callable[[Any], Node],
        names: Callable[[str, str], Node],
    ) -> None:
        self._data = data
        self._where = where
        self._limits = limits
        self._work = Work(limits.steps)
        self._persistent = persistent
        self._find_name = names
        self._names: dict[tuple[str, str], Node] = {}
        self._misplaced = 0
        """Number of values that were stored in another place of the memo than the next one."""
        self._holes = False
        """True if the memo has places that were not filled."""

    def run(self) -> Node:  # noqa: PLR0912, PLR0915 - one fast loop over millions of opcodes
        """Return the value of the pickle."""
        data, work, length, opcodes = self._data, self._work, len(self._data), self._limits.opcodes
        stack: list[Any] = []
        marks: list[list[Any]] = []
        memo: list[Any] = []
        position = count = weight = frame = 0
        stop = min(RUN, length)
        try:
            while True:
                while position < stop:
                    code = opcodes[data[position]]
                    count += 1
                    if code == 0x72:  # LONG_BINPUT
                        place = _read_uint(data, position + 1)[0]
                        position += 5
                        if place == len(memo):
                            memo.append(stack[-1])
                        else:
                            self._put(memo, place, stack[-1], count)
                    elif code == 0x4B:  # BININT1
                        stack.append(data[position + 1])
                        position += 2
                    elif code == 0x68:  # BINGET
                        if (value := memo[data[position + 1]]) is _ABSENT:
                            raise IndexError("a value that was not stored")
                        stack.append(value)
                        position += 2
                    elif code == 0x94:  # MEMOIZE
                        if self._holes:
                            raise ValueError("two ways to store values")
                        memo.append(stack[-1])
                        position += 1
                    elif code == 0x28:  # MARK
                        marks.append(stack)
                        stack = []
                        position += 1
                    elif code == 0x58 or code in _TEXTS:
                        weight += 48
                        width, kind = _TEXTS[code]
                        begin = position + 1 + width.size
                        position = begin + width.unpack_from(data, position + 1)[0]
                        if position > length:
                            raise IndexError
                        if kind == "text":
                            stack.append(str(data[begin:position], "utf-8", "surrogatepass"))
                        elif kind == "bytes":
                            stack.append(data[begin:position])
                        elif kind == "ascii":
                            stack.append(str(data[begin:position], "ascii"))
                        else:
                            stack.append(work.read_int(data[begin:position], self._where))
                    elif 0x85 <= code <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                        weight += 56
                        value = stack.pop()
                        if code == 0x86:
                            stack[-1] = stack[-1], value
                        elif code == 0x85:
                            stack.append((value,))
                        else:
                            second = stack.pop()
                            stack[-1] = stack[-1], second, value
                        position += 1
                    elif code == 0x74:  # TUPLE
                        weight += 56
                        items, stack = stack, marks.pop()
                        stack.append(tuple(items))
                        position += 1
                    elif code == 0x52:  # REDUCE
                        weight += 152
                        arguments = stack.pop()
                        function = stack[-1]
                        if not isinstance(arguments, tuple):
                            raise TypeError("arguments must be a tuple")
                        if type(function) is Name:
                            if function.make is None:
                                work.steps -= 1 + len(arguments)
                                stack[-1] = StandIn(function, arguments)
                            else:
                                stack[-1] = self._call(function, arguments)
                        else:
                            stack[-1] = self._call(function, arguments)
                        position += 1
                    elif code == 0x51:  # BINPERSID
                        weight += 152
                        work.steps -= 1
                        stack[-1] = self._persistent(stack[-1])
                        position += 1
                    elif code in _KEYWORDS:
                        stack.append(_KEYWORDS[code])
                        position += 1
                    elif code == 0x29:  # EMPTY_TUPLE
                        stack.append(())
                        position += 1
                    elif code == 0x6A:  # LONG_BINGET
                        if (value := memo[_read_uint(data, position + 1)[0]]) is _ABSENT:
                            raise IndexError("a value that was not stored")
                        stack.append(value)
                        position += 5
                    elif code == 0x71:  # BINPUT
                        place = data[position + 1]
                        position += 2
                        if place == len(memo):
                            memo.append(stack[-1])
                        else:
                            self._put(memo, place, stack[-1], count)
                    elif code == 0x4D:  # BININT2
                        stack.append(_read_short(data, position + 1)[0])
                        position += 3
                    elif code == 0x4A:  # BININT
                        weight += 48
                        stack.append(_read_int(data, position + 1)[0])
                        position += 5
                    elif code == 0x47:  # BINFLOAT
                        weight += 48
                        stack.append(_read_float(data, position + 1)[0])
                        position += 9
                    elif code == 0x7D:  # EMPTY_DICT
                        weight += 72
                        stack.append({})
                        position += 1
                    elif code == 0x5D:  # EMPTY_LIST
                        weight += 64
                        stack.append([])
                        position += 1
                    elif code in (0x75, 0x73):  # SETITEMS, SETITEM
                        if code == 0x75:
                            items, stack = stack, marks.pop()
                        else:
                            items = [stack[-2], stack[-1]]
                            del stack[-2:]
                        self._set_items(stack[-1], items)
                        position += 1
                    elif code in (0x65, 0x61):  # APPENDS, APPEND
                        if code == 0x65:
                            items, stack = stack, marks.pop()
                        else:
                            items = [stack.pop()]
                        self._extend(stack[-1], items)
                        position += 1
                    elif code == 0x62:  # BUILD
                        state = stack.pop()
                        if type(stack[-1]) is StandIn and not stack[-1].kind.is_record:
                            stack[-1].state = state
                        else:
                            self._build(stack[-1], state)
                        position += 1
                    elif code == 0x81:  # NEWOBJ
                        weight += 152
                        arguments = stack.pop()
                        stack[-1] = self._create(stack[-1], arguments)
                        position += 1
                    elif code == 0x63:  # GLOBAL
                        middle = data.find(b"\n", position)
                        end = data.find(b"\n", middle + 1)
                        if middle < 0 or end < 0:
                            raise LimitError("the pickle ends too early")
                        stack.append(self._name(*(str(data[position + 1 : end], "utf-8").split("\n"))))
                        position = end + 1
                    elif code == 0x93:  # STACK_GLOBAL
                        name = stack.pop()
                        stack[-1] = self._name(stack[-1], name)
                        position += 1
                    elif code == 0x2E:  # STOP
                        value = stack.pop()
                        if frame and frame != position + 1:
                            raise ValueError("a frame that does not end with the pickle")
                        self._check(weight + 8 * count + 72 * len(marks))
                        return value
                    elif code == 0x80:  # PROTO
                        if data[position + 1] > 5:
                            raise ValueError(f"unsupported pickle protocol: {data[position + 1]}")
                        position += 2
                    elif code == 0x95:  # FRAME
                        if frame:
                            raise ValueError("a frame in a frame")
                        position += 9
                        frame = position + _read_long(data, position - 8)[0]
                        if frame > length:
                            raise ValueError("a frame that is longer than the pickle")
                        stop = min(position + RUN, frame)
                    elif code == 0x8F:  # EMPTY_SET
                        weight += 224
                        stack.append(set())
                        position += 1
                    elif code == 0x90:  # ADDITEMS
                        items, stack = stack, marks.pop()
                        if type(stack[-1]) is not set:
                            raise TypeError(f"items are added to {show_value(stack[-1])}")
                        work.check_keys(items)
                        stack[-1].update(items)
                        position += 1
                    elif code == 0x91:  # FROZENSET
                        weight += 224
                        items, stack = stack, marks.pop()
                        work.check_keys(items)
                        work.spend(b"frozen" * 100)
                        stack.append(frozenset(items))
                        position += 1
                    elif code == 0x6C:  # LIST
                        weight += 64
                        items, stack = stack, marks.pop()
                        stack.append(items)
                        position += 1
                    elif code == 0x64:  # DICT
                        weight += 72
                        items, stack = stack, marks.pop()
                        stack.append({})
                        self._set_items(stack[-1], items)
                        position += 1
                    elif code == 0x92:  # NEWOBJ_EX
                        weight += 152
                        named, arguments = stack.pop(), stack.pop()
                        stack[-1] = self._create(stack[-1], arguments, named)
                        position += 1
                    elif code == 0x30:  # POP
                        if stack:
                            stack.pop()
                        else:
                            stack = marks.pop()
                        position += 1
                    elif code == 0x31:  # POP_MARK
                        stack = marks.pop()
                        position += 1
                    else:
                        raise UnsafeObjectError(
                            f"{self._where}: the pickle has an opcode that tensors do not need, "
                            f"{data[position : position + 1]!r} at {position}; refusing to run it"
                        )
                if frame and position >= frame:
                    if position > frame:
                        raise ValueError("a frame that ends in an opcode")
                    frame = 0
                if position >= length:
                    raise LimitError("the pickle ends too early")
                self._check(weight + 8 * count + 72 * len(marks))
                stop = min(position + RUN, frame or length)
        except (IndexError, struct.error) as error:
            cut = position > length or (position + 1 == length and data[position] in b"Khq\x80")
            if cut or isinstance(error, struct.error):
                raise LimitError("the pickle ends too early") from error
            raise

    def _check(self, memory: int) -> None:
        """Raise if the pickle exceeds its limits."""
        if memory > self._limits.memory:
            raise LimitError(f"the pickle of {len(self._data):,} bytes would need {memory:,} bytes of memory")
        if self._work.steps < 0:
            raise ValueError("too many repeated values")

    def _put(self, memo: list[Any], place: int, value: Node, count: int) -> None:
        """Store a value in another place of the memo than the next one.

        `count` is the number of opcodes so far. Those that create values are at least as many as the places.
        """
        self._misplaced += 1
        if place > count - len(memo) - self._misplaced:
            raise LimitError("the pickle claims memory that it does not use")
        if place < len(memo):
            memo[place] = value
            return
        self._holes = True
        memo += [_ABSENT] * (place - len(memo))
        memo.append(value)

    def _name(self, module: Any, name: Any) -> Node:
        if type(module) is not str or type(name) is not str or not module or not name:
            raise ValueError("a name must be a text")
        found = self._names.get((module, name))
        if found is None:
            if b"\0" in f"{module}.{name}".encode():
                raise ValueError("a name with a zero byte")
            if len(self._names) >= MOST_NAMES:
                raise ValueError(f"the pickle names more than {MOST_NAMES:,} classes")
            found = self._names[module, name] = self._find_name(module, name)
        return found

    def _call(self, function: Node, arguments: tuple[Any, ...]) -> Node:
        """Return the node of a call, for other functions than those that have no node of their own."""
        if type(function) is StandIn and function.kind.make is None:  # a pickle calls what `functools.partial` returns
            self._work.spend(arguments, (function,))
            return StandIn(function.kind, (function, *arguments))
        if type(function) is not Name or function.make is None:
            raise TypeError(f"a call of {show_value(function)}")
        return function.make(self._work, function, arguments)

    def _create(self, kind: Node, arguments: Any, named: Any = None) -> Node:
        """Return the stand-in of an object that is created without a call of `__init__`."""
        if not isinstance(arguments, tuple) or not (named is None or isinstance(named, dict)):
            raise TypeError("arguments must be a tuple")
        if type(kind) is not Name or not kind.is_class:
            if not isinstance(kind, (StandIn, Name)):
                raise TypeError(f"only a class can create an object, got {show_value(kind)}")
            raise NotKnownError(f"an object of {_name_class(kind)} that is created without a call")
        self._work.spend(arguments)
        made = StandIn(kind, arguments) if kind.make is None else kind.make(self._work, kind, arguments)
        made.named = named or None
        return made

    def _set_items(self, target: Node, items: list[Any]) -> None:
        """Set items of a dict, from keys and values in turn."""
        if len(items) % 2:
            raise ValueError("a key without a value")
        keys = items[::2]
        self._work.check_keys(key for key in keys if type(key) is not str)
        if isinstance(target, dict):
            target.update(zip(keys, items[1::2], strict=True))
        elif type(target) is not StandIn or target.kind.is_record:
            raise TypeError(f"items are set in {show_value(target)}")

    def _extend(self, target: Node, items: list[Any]) -> None:
        if isinstance(target, list):
            target += items
        elif type(target) is not StandIn or target.kind.is_record:
            raise TypeError(f"items are appended to {show_value(target)}")

    def _build(self, target: Node, state: Any) -> None:
        """Set the state of an object that is not a plain stand-in."""
        if type(target) is StandIn:
            fields = {} if state is None else join_fields(state)
            if fields is None:
                raise TypeError("the state of DCP's metadata must be fields")
            self._work.spend(fields)
            if not all(type(each) is str for each in fields):
                raise TypeError("the fields of DCP's metadata must have texts as names")
            if target.state is None:
                target.state = {}
            target.state.update(fields)
        elif type(target) is collections.OrderedDict and isinstance(state, dict):
            if "_metadata" in state:  # the versions of the modules of a state dict
                target._metadata = state["_metadata"]  # type: ignore[attr-defined]
        elif isinstance(target, (StandIn, Name)):
            raise NotKnownError(f"a state of {_name_class(target)}")
        else:
            raise TypeError(f"only an object can have a state, got {show_value(target)}")


def _name_class(value: Node) -> str:
    """Return the whole name of a stand-in for a message, or the kind of another value."""
    return value.name if isinstance(value, (StandIn, Name)) else show_value(value)
