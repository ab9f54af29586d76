"""Checkpoint files for tests: raw GGUF bytes, tiny models, one set of weights in both formats."""

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import MODEL_ARCH, GGUFWriter
from gguf.tensor_mapping import get_tensor_name_map
from safetensors.numpy import save_file

from models.config import ModelConfig
from models.families import family_of_hf
from models.model import declare
from models.params import Param, flatten

U32, U64, STRING, ARRAY = 4, 10, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def raw_gguf(
    fields: list[bytes],
    tensors: list[tuple[str, list[int], int, bytes]],
    *,
    offsets: list[int] | None = None,
    version: int = 3,
    num_fields: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    """A GGUF file byte by byte, with nothing checked: tensors are (name, axes, type id, data)."""
    header = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(fields) if num_fields is None else num_fields,
    )
    header += b"".join(fields)
    data, starts = b"", []
    for _, _, _, raw in tensors:
        starts.append(len(data))
        data += raw + bytes(-len(raw) % 32)
    for (name, axes, kind, _), start in zip(tensors, offsets or starts, strict=True):
        header += text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, start)
    return header + bytes(-len(header) % 32) + data


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def write_gguf(
    path: Path, arch: str, fields: dict[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    """A float32 GGUF file by the gguf package; keys of `fields` without a dot are the arch's."""
    writer = GGUFWriter(path, arch)
    for key, value in fields.items():
        if not key.startswith(("tokenizer.", "split.")):
            key = f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_shape(param: Param) -> tuple[int, ...]:
    """As checkpoints keep it: heads and head width in one axis."""
    if "D" not in param.dims or len(param.dims) == 1:
        return (param.size,)
    width = param.shape[param.dims.index("D")]
    rest = param.size // width
    return (width, rest) if param.dims[0] == "D" else (rest, width)


def hf_tensors(fields: dict[str, Any], seed: int = 0) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """(config, random tensors under the family's own names and shapes); norm scales up to 20."""
    family = family_of_hf(fields)
    config = family.config_from_hf(fields)
    params, tensors = flatten(declare(config)), {}
    rng = np.random.default_rng(seed)
    for path, source in family.hf_sources(config).items():
        shape = stored_shape(params[path])
        rows = source.rows[1] if source.rows else shape[0]
        shape = (max(rows, len(tensors.get(source.name, ()))), *shape[1:])
        if source.transpose and source.name in tensors:
            shape = (max(rows, tensors[source.name].shape[1]), *shape[1:])
        values = rng.normal(0, 8 if "norm" in path else 1, shape).astype(np.float32)
        tensors[source.name] = values.T if source.transpose else values
    return config, {name: np.ascontiguousarray(value) for name, value in tensors.items()}


def write_hf(
    directory: Path,
    fields: dict[str, Any],
    tensors: dict[str, np.ndarray],
    dtype: Any = np.float32,
    shards: int = 1,
) -> None:
    """config.json and safetensors; several shards come with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    tensors = {name: value.astype(dtype) for name, value in tensors.items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    names, weight_map = sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def as_gguf(
    arch: str, config: ModelConfig, tensors: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What a converter stores: names by the gguf package's own table, q and k rows interleaved for
    Llama's rotation, Gemma's norms as factors, GPT-2's weights output axis first."""
    kind = next(k for k in MODEL_ARCH if k.name.lower() == arch)
    table = get_tensor_name_map(kind, len(config.layers))
    mixer, found = config.layers[0].mixer, {}
    for name, value in tensors.items():
        if arch in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            heads = mixer.num_heads if "q_proj" in name else mixer.num_kv_heads
            halves = value.reshape(heads, 2, mixer.head_dim // 2, *value.shape[1:])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            value = value + np.float32(1)
        if arch == "gpt2" and value.ndim == 2 and ".c_" in name:
            value = value.T
        found[table.get_name(name, try_suffixes=(".weight", ".bias"))] = value
    return found


SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
}
SMALL_GGUF = {
    "context_length": 256,
    "embedding_length": 48,
    "feed_forward_length": 40,
    "block_count": 3,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 50000.0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
LLAMA = {"model_type": "llama", **SMALL}
BFLOAT16 = ml_dtypes.bfloat16

GEMMA = {"tie_word_embeddings": True, "sliding_window": 7, "query_pre_attn_scalar": 16}
GEMMA_GGUF = {"attention.sliding_window": 7}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 97,
    "n_embd": 48,
    "n_head": 4,
    "n_layer": 3,
    "n_inner": 40,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_GGUF = {
    key: value for key, value in SMALL_GGUF.items() if not key.startswith(("rope", "attention"))
} | {"attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5}

# architecture -> (config.json, metadata), each saying what the other says
MODELS = {
    "llama": ({"model_type": "llama"}, {}),
    "qwen2": ({"model_type": "qwen2"}, {}),
    "qwen3": ({"model_type": "qwen3"}, {}),
    "smollm3": ({"model_type": "smollm3", "num_hidden_layers": 5}, {"block_count": 5}),
    "olmo2": ({"model_type": "olmo2"}, {}),
    "phi3": ({"model_type": "phi3", "sliding_window": 9}, {"attention.sliding_window": 9}),
    "gemma2": ({"model_type": "gemma2", **GEMMA}, GEMMA_GGUF),
    "gemma3": (
        {"model_type": "gemma3_text", **GEMMA, "num_hidden_layers": 7},
        {**GEMMA_GGUF, "block_count": 7},
    ),
    "gpt2": (GPT2, GPT2_GGUF),
}


def gguf_and_hf_fields(arch: str) -> tuple[dict, dict]:
    hf, gguf = MODELS[arch]
    return (gguf, hf) if arch == "gpt2" else ({**SMALL_GGUF, **gguf}, {**SMALL, **hf})


def llama_file(path: Path) -> dict[str, np.ndarray]:
    """A sound tiny Llama GGUF; returns its tensors."""
    config, tensors = hf_tensors(LLAMA)
    stored = as_gguf("llama", config, tensors)
    write_gguf(path, "llama", SMALL_GGUF, stored)
    return stored


def bits(array: np.ndarray) -> np.ndarray:
    """For comparisons in which NaN equals itself."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
