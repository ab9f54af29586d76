"""GGUF files as a `TensorStore`: tensors come out dequantised to float32.

Dequantisation is the gguf package's own, block by block, over slices that keep the quantised bytes
and the temporaries small whatever the tensor's size. Invariant: the result equals
`gguf.quants.dequantize` of the whole tensor bit for bit, and a type that it does not know raises.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from models.checkpoint.gguf_header import TensorInfo, read_header

# The package works on groups of 16 rows. One group of long rows at a time keeps its temporaries in
# the processor's cache and its Python steps few: 2 to 5 times as fast as whole 640-wide matrices.
ROW_ELEMENTS = 8192
SLICE_ROWS = 16


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def where(self, name: str) -> str:
        return f"{self.path}: tensor {name!r} (type {self.tensors[name].type.name})"

    def read(self, name: str) -> np.ndarray:
        """The tensor in float32, at its own shape."""
        info = self.tensors[name]
        block_elements, block_bytes = GGML_QUANT_SIZES[info.type]
        row_blocks = ROW_ELEMENTS // block_elements
        out = np.empty(math.prod(info.shape), np.float32)
        done, left_bytes = 0, info.size_bytes
        with self.path.open("rb") as file:
            file.seek(info.offset)
            while left_bytes:
                rows = min(SLICE_ROWS, left_bytes // (row_blocks * block_bytes))
                # What does not fill a row comes last, as one short row.
                row_bytes = row_blocks * block_bytes if rows else left_bytes
                raw = np.fromfile(file, np.uint8, max(rows, 1) * row_bytes)
                if len(raw) != max(rows, 1) * row_bytes:
                    raise ValueError(f"{self.where(name)}: the file ended while it was read")
                values = self._dequantize(name, raw.reshape(-1, row_bytes))
                out[done : done + values.size] = values.reshape(-1)
                done += values.size
                left_bytes -= len(raw)
        assert done == out.size, (name, done, out.size)
        return out.reshape(info.shape)

    def _dequantize(self, name: str, raw: np.ndarray) -> np.ndarray:
        kind = self.tensors[name].type
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                return dequantize(raw, kind)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.where(name)}: type {kind.name} (id {int(kind)}) cannot be dequantised; "
                "convert the model to another type, for example F16, Q8_0 or Q4_K"
            ) from error


def open_gguf(path: str | Path) -> GGUFFile:
    """Check the file's header and return it; ValueError says what is wrong with it."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no GGUF file at {path}; check the path")
    fields, tensors = read_header(path)
    parts = fields.get("split.count", 0)
    if type(parts) is not int or parts > 1:
        raise ValueError(f"{path} is one of {parts} parts; join them to one file first")
    return GGUFFile(path, fields, tensors)
