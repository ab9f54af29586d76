"""The header of a GGUF file: metadata fields and where each tensor lies.

In: a path. Out: (fields, tensors). Invariant: nothing in the file is believed before it is checked
against the file's size, so a damaged or lying file costs one ValueError, never memory or time that
its size does not justify; and every `TensorInfo` returned lies inside the file, in its own bytes.

Layout (version 3; version 2 is the same), little-endian:
    magic "GGUF" | version u32 | tensor count u64 | field count u64
    fields:  name, value type u32, value       (strings and arrays carry a u64 length)
    tensors: name, number of axes u32, axes u64 (fastest first), type u32, offset u64
    padding to the alignment | data, each tensor padded to the alignment
Specification: docs/gguf.md of ggml.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

VERSIONS = (2, 3)
MAX_AXES = 4
# The largest vocabularies have 2^18 tokens and half a million merges.
MAX_ARRAY_LENGTH = 1 << 22
DEFAULT_ALIGNMENT = 32

# Value types by id; 8 is a string, 9 an array.
SCALARS = dict(
    zip(
        (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12),
        ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "<u8", "<i8", "<f8"),
        strict=True,
    )
)
STRING, ARRAY = 8, 9
U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """`shape` is in numpy's order (slowest axis first); `offset` counts from the file's start."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    size_bytes: int


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Fields as Python values (int, float, bool, str, list of those) and tensors by name."""
    if path.stat().st_size < 24:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, a GGUF file at least 24; download it again"
        )
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        num_tensors, num_fields = _preamble(cursor)
        fields = _read_fields(cursor, num_fields)
        return fields, _read_tensors(cursor, num_tensors, _alignment(path, fields))


class _Cursor:
    """Reads forward through the file; every read is checked against what is left."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.position, self.size = path, data, 0, len(data)

    def bad(self, why: str) -> ValueError:
        return ValueError(
            f"{self.path} is damaged at byte {self.position}: {why}; download or convert it again"
        )

    def need(self, count: int, item_bytes: int, what: str) -> None:
        left_bytes = self.size - self.position
        if count * item_bytes > left_bytes:
            raise self.bad(
                f"{count} {what} need {count * item_bytes} bytes, the file has {left_bytes} left"
            )

    def scalars(self, dtype: str, count: int, what: str) -> list:
        item_bytes = np.dtype(dtype).itemsize
        self.need(count, item_bytes, what)
        start = self.position
        self.position += count * item_bytes
        return np.frombuffer(self.data[start : self.position], dtype).tolist()

    def scalar(self, dtype: str, what: str) -> Any:
        return self.scalars(dtype, 1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        self.need(count, 8, what)
        data, size, position, texts = self.data, self.size, self.position, []
        for _ in range(count):
            start = position + 8
            if start > size:
                self.position = position
                raise self.bad(f"{what} end in the middle of a length")
            end = start + U64.unpack_from(data, position)[0]
            if end > size:
                self.position = position
                raise self.bad(f"a string of {end - start} bytes, the file has {size - start} left")
            try:
                texts.append(data[start:end].decode())
            except UnicodeDecodeError as error:
                self.position = position
                raise self.bad(f"a string that is not UTF-8 ({error.reason})") from error
            position = end
        self.position = position
        return texts

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.data[:4]
    if magic != b"GGUF":
        raise ValueError(f"{cursor.path} starts with {magic!r}, a GGUF file with b'GGUF'")
    cursor.position = 4
    version = cursor.scalar("<u4", "versions")
    if version and not version & 0xFFFF:
        raise ValueError(f"{cursor.path} is a big-endian GGUF file; convert it to little-endian")
    if version not in VERSIONS:
        raise ValueError(
            f"{cursor.path} has GGUF version {version}; versions {VERSIONS} are supported: "
            "convert the model again with a current converter"
        )
    num_tensors, num_fields = cursor.scalars("<u8", 2, "counts")
    # The shortest field takes 13 bytes, the shortest tensor record 32.
    cursor.need(num_fields, 13, "metadata fields")
    cursor.need(num_tensors, 32, "tensor records")
    return num_tensors, num_fields


def _read_fields(cursor: _Cursor, count: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for _ in range(count):
        name = cursor.string("field names")
        if name in fields:
            raise cursor.bad(f"metadata field {name!r} appears twice")
        kind = cursor.scalar("<u4", "value types")
        if kind == STRING:
            fields[name] = cursor.string("strings")
        elif kind == ARRAY:
            fields[name] = _read_array(cursor, name)
        elif kind in SCALARS:
            fields[name] = cursor.scalar(SCALARS[kind], "values")
        else:
            raise cursor.bad(f"metadata field {name!r} has the unknown value type {kind}")
    return fields


def _read_array(cursor: _Cursor, name: str) -> list:
    kind = cursor.scalar("<u4", "value types")
    length = cursor.scalar("<u8", "array lengths")
    if length > MAX_ARRAY_LENGTH:
        raise cursor.bad(
            f"metadata array {name!r} has {length} elements, at most {MAX_ARRAY_LENGTH} are read"
        )
    if kind == STRING:
        return cursor.strings(length, f"strings of {name!r}")
    if kind in SCALARS:
        return cursor.scalars(SCALARS[kind], length, f"elements of {name!r}")
    raise cursor.bad(f"metadata array {name!r} has elements of the unsupported value type {kind}")


def _alignment(path: Path, fields: dict[str, Any]) -> int:
    alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{path}: general.alignment is {alignment!r}, it must be a power of two")
    return alignment


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    records: dict[str, tuple] = {}
    for _ in range(count):
        name = cursor.string("tensor names")
        if name in records:
            raise cursor.bad(f"tensor {name!r} appears twice")
        num_axes = cursor.scalar("<u4", "axis counts")
        if not 1 <= num_axes <= MAX_AXES:
            raise cursor.bad(f"tensor {name!r} has {num_axes} axes, 1 to {MAX_AXES} are possible")
        axes = cursor.scalars("<u8", num_axes, "axes")
        type_id = cursor.scalar("<u4", "tensor types")
        records[name] = (axes, type_id, cursor.scalar("<u8", "tensor offsets"))

    start = cursor.position + -cursor.position % alignment
    expected, tensors = 0, {}
    for name, (axes, type_id, offset) in records.items():
        kind = _tensor_type(cursor.path, name, type_id)
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        if min(axes) < 1 or axes[0] % block_elements:
            raise cursor.bad(
                f"tensor {name!r} of type {kind.name} has axes {axes}; each must be positive, "
                f"the first a multiple of {block_elements}"
            )
        size_bytes = math.prod(axes) // block_elements * block_bytes
        # Tensors follow each other without holes, so one lie about a size or offset shows.
        if offset != expected:
            raise cursor.bad(f"tensor {name!r} is said to start at {offset}, not at {expected}")
        if start + offset + size_bytes > cursor.size:
            raise cursor.bad(
                f"tensor {name!r} ends at byte {start + offset + size_bytes}, the file has "
                f"{cursor.size} bytes"
            )
        tensors[name] = TensorInfo(tuple(reversed(axes)), kind, start + offset, size_bytes)
        expected = offset + size_bytes + -size_bytes % alignment
    return tensors


def _tensor_type(path: Path, name: str, type_id: int) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(type_id)
    except ValueError as error:
        raise ValueError(
            f"{path}: tensor {name!r} has the unknown type {type_id}; convert the model to a type "
            "of the gguf package, for example F16, Q8_0 or Q4_K"
        ) from error
