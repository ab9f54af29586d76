"""What a compiled program does, read from the text of its optimized HLO.

`program(text)` gives a tree of regions: the main path, and below it each loop and each branch, with
the device operations of each in order. A loop whose condition only reads a flag that it carries is
one of zero or one trips (`when`); any other condition makes it a counted loop. An operation is what
the device starts on its own: a fusion is one, whatever is fused into it; tuples, bitcasts and the
like are none. Invariant: every operation of a computation that runs is in exactly one region.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_NO_WORK = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "domain",
    "add-dependency",
}


@dataclass(frozen=True)
class Op:
    """`opcode` without -start; `shape` as HLO writes it, without layout; `source` is file:line and
    the name of the jax operation that the compiler attributes it to."""

    name: str
    opcode: str
    shape: str
    operand_shapes: tuple[str, ...] = ()
    source: str = ""


@dataclass
class Region:
    """`trips` is the loop's count where the compiler proved one, or the constant below which its
    counter must be."""

    kind: Literal["main", "when", "loop", "branch"]
    name: str
    trips: int | None = None
    source: str = ""
    ops: list[Op] = field(default_factory=list)
    regions: list["Region"] = field(default_factory=list)

    def walk(self) -> Iterator["Region"]:
        yield self
        for region in self.regions:
            yield from region.walk()

    def all_ops(self) -> Iterator[Op]:
        for region in self.walk():
            yield from region.ops

    def count(self) -> int:
        """Operations here and in everything below, each once."""
        return sum(1 for _ in self.all_ops())


@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str


def program(text: str) -> Region:
    """The region tree of one optimized HLO module."""
    computations, entry = _computations(text)
    return _Reader(computations, _sources(text)).region("main", entry)


def collectives(region: Region) -> dict[str, int]:
    """How many of each kind stand in the program, loops counted once."""
    return dict(Counter(op.opcode for op in region.all_ops() if op.opcode in COLLECTIVES))


def copies_of(region: Region, shapes: set[str]) -> list[Op]:
    """Copies and transposes that make an array of one of these shapes (`f32[8,16]`), fused or not.

    A fusion counts when it is nothing but a copy or a transpose; its name says so.
    """
    moves = re.compile(r"(copy|transpose)")

    def is_move(op: Op) -> bool:
        if op.opcode in ("copy", "transpose"):
            return True
        return op.opcode == "fusion" and bool(moves.search(op.name))

    return [op for op in region.all_ops() if is_move(op) and shapes & set(_arrays(op.shape))]


def _arrays(shape: str) -> list[str]:
    return re.findall(r"\w+\[[\d,]*\]", shape)


# ---- reading -------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, computations: dict[str, list[_Instruction]], sources: dict[str, str]):
        self.computations, self.sources = computations, sources

    def region(self, kind, name: str, trips: int | None = None, source: str = "") -> Region:
        region = Region(kind=kind, name=name, trips=trips, source=source)
        self._fill(region, name)
        return region

    def _fill(self, region: Region, computation: str) -> None:
        shapes = {i.name: i.shape for i in self.computations[computation]}
        for i in self.computations[computation]:
            if i.opcode == "while":
                region.regions.append(self._loop(i))
            elif i.opcode == "conditional":
                for branch in _called(i, "branch_computations", "true_computation") + _called(
                    i, "false_computation"
                ):
                    region.regions.append(self.region("branch", branch, source=self._source(i)))
            elif i.opcode in ("call", "async-start"):
                for callee in _called(i, "to_apply", "calls"):
                    self._fill(region, callee)
            elif i.opcode not in _NO_WORK and not i.opcode.endswith(("-done", "-update")):
                operands = re.findall(r"%([\w.\-]+)", i.operands)
                region.ops.append(
                    Op(
                        name=i.name,
                        opcode=i.opcode.removesuffix("-start"),
                        shape=_plain(i.shape),
                        operand_shapes=tuple(_plain(shapes[o]) for o in operands if o in shapes),
                        source=self._source(i),
                    )
                )

    def _loop(self, i: _Instruction) -> Region:
        (condition,), (body,) = _called(i, "condition"), _called(i, "body")
        opcodes = {j.opcode for j in self.computations[condition]}
        reads_flag = opcodes <= {"parameter", "get-tuple-element", "copy", "bitcast"}
        kind = "when" if reads_flag else "loop"
        return self.region(kind, body, self._trips(i, condition), self._source(i))

    def _trips(self, i: _Instruction, condition: str) -> int | None:
        if counted := re.search(r'"known_trip_count":\{"n":"(\d+)"', i.attributes):
            return int(counted[1])
        last = self.computations[condition][-1]
        limits = [
            int(j.operands)
            for j in self.computations[condition]
            if j.opcode == "constant" and j.operands.isdecimal()
        ]
        compares = last.opcode == "compare" and "direction=LT" in last.attributes
        return limits[0] if compares and len(limits) == 1 else None

    def _source(self, i: _Instruction) -> str:
        frame = re.search(r"stack_frame_id=(\d+)", i.attributes)
        file = re.search(r'source_file="([^"]*)"', i.attributes)
        line = re.search(r"source_line=(\d+)", i.attributes)
        name = re.search(r'op_name="([^"]*)"', i.attributes)
        where = self.sources.get(frame[1], "") if frame else ""
        if file and line:
            where = f"{file[1]}:{line[1]}"
        return " ".join(filter(None, (where, name[1] if name else "")))


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" ") and (m := _HEADER.match(line)):
            current = computations[m["name"]] = []
            entry = m["name"] if m["entry"] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (instruction := _instruction(line)):
            current.append(instruction)
    if not entry:
        raise ValueError("the text holds no ENTRY computation: is it an HLO module?")
    return computations, entry


_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(")
_START = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = ")


def _instruction(line: str) -> _Instruction | None:
    start = _START.match(line)
    if not start:
        return None
    rest = line[start.end() :]
    shape_end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:shape_end], rest[shape_end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = _closing(rest)
    return _Instruction(
        name=start["name"],
        shape=shape,
        opcode=opcode,
        operands=rest[len(opcode) + 1 : end],
        attributes=rest[end + 1 :],
    )


def _closing(text: str) -> int:
    """Index of the parenthesis that closes the first one."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == ")" and depth == 0:
            return at
    return len(text)


def _called(i: _Instruction, *keys: str) -> list[str]:
    found = []
    for key in keys:
        match = re.search(key + r"=(\{[^}]*\}|%?[\w.\-]+)", i.attributes)
        found += re.findall(r"[\w.\-]+", match[1]) if match else []
    return found


def _plain(shape: str) -> str:
    """Without layouts and comments: `f32[8,16]{1,0:T(8,128)}` is `f32[8,16]`."""
    return re.sub(r"\{[^}]*\}|/\*.*?\*/", "", shape)


def _sources(text: str) -> dict[str, str]:
    """file:line of each stack frame, from the tables at the head of the module."""
    files = dict(re.findall(r'^(\d+) "([^"]*)"$', _section(text, "FileNames"), re.M))
    places = re.findall(
        r"^(\d+) \{file_name_id=(\d+).*? line=(\d+)", _section(text, "FileLocations"), re.M
    )
    location = {at: f"{files.get(file, '?')}:{line}" for at, file, line in places}
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", _section(text, "StackFrames"), re.M)
    return {frame: location.get(at, "") for frame, at in frames}


def _section(text: str, title: str) -> str:
    match = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", text, re.M | re.S)
    return match[1] if match else ""
