"""The names in a pickle, by following its instructions without their effects: also in those that are broken on purpose.

The machine holds texts and names, and a placeholder for any other value. It goes on where a reader would stop, since an
unpickler has then run all that came before.
"""

from __future__ import annotations

import pickletools
import re
import warnings
from io import BufferedIOBase, BytesIO
from pickletools import markobject as MARK
from typing import Any

from snapshot_scan.names import COMPUTED, Name, judge_name

MOST_OPCODES = 20_000_000
"""Instructions that are followed for one file."""
MOST_HELD = 4_000_000
"""Values on the stack and in the memo of one pickle."""
MOST_TEXT = 128 << 20
"""Characters of the texts in one pickle that may be names."""
LONGEST = 4096
"""Bytes of a text that may be a name; longer ones are skipped."""
VALUE, TEXT, RESULT = object(), object(), object()
"""Stand for a value that is neither a text nor a name, for what may be a text, and for what a call returned."""
_OPCODES = {each.code.encode("latin-1"): each for each in pickletools.opcodes}
_TEXTS = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_WORD = re.compile(r"[\w.]+")
"""A module or a name, unless it is made of random bytes."""
_COUNTED = {-2: 1, -3: 4, -4: 4, -5: 8}
"""Bytes of an operand's length, by the number that pickletools has for its kind."""


class Pickle:
    """What one pickle names and calls, and its faults."""

    def __init__(self, *, tolerant: bool = False) -> None:
        """`tolerant`: go on after faults even without a header."""
        self.headed = self.stopped = self.limited = self._broken = False
        self._tolerant = tolerant
        self.names: dict[Name, bool] = {}
        """The names in their order, and whether each is called."""
        self.faults: dict[str, None] = {}
        self.opcodes = 0
        self._stack: list[Any] = []

    def is_pickle(self, *, expected: bool, searched: bool = False, text: bool = False) -> bool:
        """Return False if the bytes are probably other data.

        `expected`: their place is one for pickles. `searched`: their beginning was only found by a search. `text`: they
        can be read as a text.
        """
        whole = self.stopped and not self._broken
        if self.limited or (expected and (self.headed or whole)) or (self.headed and whole and not searched):
            return True
        certain = expected or whole or (not searched and (self.headed or self.stopped))
        words = not text and not searched
        return any(
            certain or called or (each != (COMPUTED, COMPUTED) and judge_name(each) == "code")
            or (words and all(map(_WORD.fullmatch, each)))
            for each, called in self.names.items()
        )  # fmt: skip

    def follow(self, stream: BufferedIOBase, size: int, most: int = MOST_OPCODES) -> None:  # noqa: PLR0912 - one loop
        """Follow the instructions up to STOP, a byte that is none, or a limit."""
        stack, memo, length = self._stack, dict[Any, Any](), 0
        while not self.stopped:
            self.opcodes += 1
            self.limited = self.opcodes > most or len(stack) + len(memo) > MOST_HELD or length > MOST_TEXT
            byte = stream.read(1)
            opcode = _OPCODES.get(byte)
            operand = None if opcode is None or self.limited else _read_operand(stream, opcode, size)
            if opcode is None or operand is None:
                if not self.limited:
                    self._fault(f"unknown opcode 0x{byte.hex()}" if byte and not opcode else "it ends too early")
                return
            name, taken = opcode.name, self._take(opcode)
            if self._broken and not (self.headed or self._tolerant):
                return
            if operand is TEXT and name in ("GET", "PUT"):
                stack += [self._fault("it stores or reads a value by a wrong number")] * (name == "GET")
            elif name.endswith("GET"):
                stack.append(memo[operand] if operand in memo else self._fault("it reads a value that was not stored"))
            elif name.endswith("PUT"):
                memo[operand] = stack[-1] if stack else self._fault("it stores a value that is not there")
            elif name in ("MEMOIZE", "DUP"):
                memo |= {len(memo): taken[0]} if name == "MEMOIZE" else {}
                stack += taken * len(opcode.stack_after)
            elif name in ("GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
                parts = taken if name == "STACK_GLOBAL" else operand
                found = Name(*(each if isinstance(each, str) else COMPUTED for each in parts))
                if name.startswith("EXT") and not (self.headed or self._tolerant):
                    self._fault("it names an extension, of which there are none")
                elif VALUE in parts:
                    self._fault("it names something by a value that is not a text")
                elif COMPUTED not in found or self.headed or not self._broken:
                    self.names[found] = self.names.get(found, False) or name == "INST"
                stack.append(RESULT if name == "INST" else found)
            elif name in ("REDUCE", "OBJ", "NEWOBJ", "NEWOBJ_EX"):  # the last two only create objects
                function = Name(COMPUTED, "call") if taken[:1] == [RESULT] else taken[0] if taken else VALUE
                if isinstance(function, Name):
                    self.names[function] = self.names.get(function, False) or name in ("REDUCE", "OBJ")
                else:
                    self._fault("it calls a value that has no name")
                stack.append(RESULT)
            else:
                if name == "BUILD" and isinstance(taken[0], Name):
                    self.faults[f"it changes {taken[0]} itself"] = None
                if name == "PROTO" and operand > 5:
                    self._fault(f"unknown protocol {operand}")
                self.headed |= name == "PROTO" and self.opcodes == 1 and not self._broken
                self.stopped = name == "STOP"
                below = taken[0] if name == "BUILD" else operand if name in _TEXTS else VALUE
                below = TEXT if name.endswith("PERSID") else below  # a reader may return anything for it
                length += len(below) if isinstance(below, str) else 0
                stack += [MARK if each is MARK else below for each in opcode.stack_after]

    def _fault(self, text: str) -> Any:
        """Note what ends an unpickler here. Return a value to go on with."""
        self.faults[text], self._broken = None, True
        return VALUE

    def _take(self, opcode: pickletools.OpcodeInfo) -> list[Any]:
        """Return the values that an instruction takes, the topmost last."""
        stack, taken, before = self._stack, [], opcode.stack_before
        if MARK in before:
            while stack and stack[-1] is not MARK:
                taken.append(stack.pop())
            _ = stack.pop() if stack else self._fault("it takes values after a mark that is not there")
            before = before[: before.index(MARK)]
        taken += [stack.pop() if stack else self._fault("it takes a value that is not there") for _ in before]
        return taken[::-1]


def _read_operand(stream: BufferedIOBase, opcode: pickletools.OpcodeInfo, size: int) -> Any:  # noqa: PLR0911 - one per kind
    """Return an operand: `VALUE` if there is none, `TEXT` if it is not known; None if the bytes end before."""
    if opcode.arg is None:
        return VALUE
    if opcode.name in ("GLOBAL", "INST"):
        lines = [_read_line(stream) for _ in range(2)]
        return None if None in lines else [_as_name(each or b"") for each in lines]
    if opcode.name.startswith("EXT"):
        return "(extension)", f"{int.from_bytes(stream.read(opcode.arg.n), 'little')}"
    if width := _COUNTED.get(opcode.arg.n):
        count = int.from_bytes(stream.read(width), "little")
        data = stream.read(min(count, LONGEST))
        if stream.tell() + count - len(data) > size:
            return None
        stream.seek(count - len(data), 1)
        return data.decode("utf-8", "backslashreplace") if count <= LONGEST else TEXT
    if opcode.arg.n > 0:
        data = stream.read(opcode.arg.n)
        return opcode.arg.reader(BytesIO(data)) if len(data) == opcode.arg.n else None
    line = _read_line(stream)
    if line is None or opcode.name == "PERSID":
        return line if line is None else VALUE
    try:
        if opcode.name in ("GET", "PUT"):  # an unpickler reads the number up to a NUL
            return int(line.partition(b"\0")[0])
        with warnings.catch_warnings():  # Python warns about unknown escapes
            warnings.simplefilter("ignore")
            return opcode.arg.reader(BytesIO(line + b"\n"))
    except ValueError:  # of a long line, or of one that only an unpickler reads
        return TEXT


def _read_line(stream: BufferedIOBase) -> bytes | None:
    """Return a line, of which only the first 64 KiB are kept; None if the bytes end before."""
    kept = part = stream.readline(1 << 16)
    while len(part) == 1 << 16 and not part.endswith(b"\n"):
        part = stream.readline(1 << 16)
    return kept.removesuffix(b"\n") if part.endswith(b"\n") else None


def _as_name(line: bytes) -> Any:
    """Return a module or name of a line: `TEXT` if it is too long, `VALUE` if no unpickler accepts it."""
    try:
        return line.decode() if len(line) <= LONGEST else TEXT if line[: 1 << 15].decode() else VALUE
    except ValueError:
        return VALUE
