"""A Hugging Face directory of safetensors files as a `TensorStore`.

`model.safetensors.index.json` decides, tensor by tensor, which file holds it; without an index
every *.safetensors file counts and no name may appear twice. The safetensors library checks each
file's header (lengths, dtypes, contiguous offsets, file size) before anything is read; tensors are
then read from the file itself, because its memory map would stay resident beside the model.
Invariant: a stray or stale file never replaces an indexed tensor.
"""

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class SafetensorsDirectory:
    path: Path
    entries: dict[str, _Entry]

    def names(self) -> Collection[str]:
        return self.entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

    def where(self, name: str) -> str:
        entry = self.entries[name]
        return f"{entry.file}: tensor {name!r} (dtype {entry.dtype})"

    def read(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise ValueError(
                f"{self.where(name)}: only {', '.join(DTYPES)} can be loaded; "
                "use the model's unquantised checkpoint or a GGUF file"
            )
        count = math.prod(entry.shape)
        with entry.file.open("rb") as file:
            file.seek(entry.offset)
            values = np.fromfile(file, dtype, count)
        if len(values) != count:
            raise ValueError(f"{self.where(name)}: the file ended while it was read")
        return values.reshape(entry.shape)


def open_safetensors(directory: Path) -> SafetensorsDirectory:
    """Check every file's header and return where each tensor lies."""
    if (directory / INDEX).is_file():
        return _open_indexed(directory)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        other = [
            p.name for p in directory.iterdir() if p.suffix in (".bin", ".pth", ".pt", ".gguf")
        ]
        found = f" but {', '.join(sorted(other)[:3])}" if other else ""
        raise ValueError(
            f"{directory} holds no .safetensors file{found}; point to a directory saved in "
            "safetensors format, or to a .gguf file itself"
        )
    entries: dict[str, _Entry] = {}
    for file in files:
        for name, entry in _read_header(file).items():
            if name in entries:
                raise ValueError(
                    f"tensor {name!r} is in {entries[name].file} and in {file}, and there is no "
                    f"{INDEX} to say which counts; remove the stale file"
                )
            entries[name] = entry
    return SafetensorsDirectory(directory, entries)


def _open_indexed(directory: Path) -> SafetensorsDirectory:
    index = directory / INDEX
    weight_map = _read_weight_map(index)
    shards: dict[str, dict[str, _Entry]] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ValueError(f"{index} names the file {shard!r}; shards lie beside their index")
        if not (directory / shard).is_file():
            raise ValueError(f"{directory / shard} is missing, {index} needs it; download it again")
        shards[shard] = _read_header(directory / shard)
    absent = [
        f"{name} ({shard})" for name, shard in weight_map.items() if name not in shards[shard]
    ]
    if absent:
        raise ValueError(
            f"{index} places {len(absent)} tensors in files that lack them: "
            f"{', '.join(absent[:10])}; download the files of one revision again"
        )
    entries = {name: shards[shard][name] for name, shard in weight_map.items()}
    return SafetensorsDirectory(directory, entries)


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        valid = all(isinstance(shard, str) for shard in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} holds no weight_map ({error!r}); download it again") from error
    if not valid:
        raise ValueError(f"{index}: weight_map must name a file for each tensor; download it again")
    return weight_map


def _read_header(file: Path) -> dict[str, _Entry]:
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{file} is no sound safetensors file ({error}); download it again"
        ) from error
    with file.open("rb") as data:
        length_bytes = int.from_bytes(data.read(8), "little")
        header = json.loads(data.read(length_bytes))
    return {
        name: _Entry(file, x["dtype"], tuple(x["shape"]), 8 + length_bytes + x["data_offsets"][0])
        for name, x in header.items()
        if name != "__metadata__"
    }
