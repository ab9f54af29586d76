"""Hugging Face directories: the index decides, and what is missing, stray, cut or lying is refused
with the name of the file or tensor."""

import json
import struct

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.checkpoint.load import load_model
from models.checkpoint.safetensors import INDEX, open_safetensors
from models.params import flatten
from tests.models.checkpoint.files import BFLOAT16, LLAMA, bits, hf_tensors, write_hf

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Q_NAME = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def sharded(tmp_path):
    """A directory of two shards; its tensors."""
    _, tensors = hf_tensors(LLAMA)
    write_hf(tmp_path, LLAMA, tensors, shards=2)
    return tmp_path, tensors


def _refused(directory, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(directory, "float32")


def _edit(file, change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def _equals(directory, tensors) -> bool:
    _, params = load_model(directory, "float32")
    wq = np.asarray(params.layers[1].mixer.wq_NHD).reshape(64, 48)
    return np.array_equal(wq, tensors[Q_NAME])


def test_b92_the_index_decides_not_a_stray_file(sharded):
    directory, tensors = sharded
    zeros = {name: np.zeros_like(value) for name, value in tensors.items()}
    save_file(zeros, directory / "consolidated.safetensors")
    save_file(zeros, directory / "a.safetensors")
    assert _equals(directory, tensors)


def test_b92_an_unindexed_duplicate_inside_a_shard_does_not_count(sharded):
    directory, tensors = sharded
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    other = SECOND if weight_map[Q_NAME] == FIRST else FIRST
    _edit(directory / other, lambda t: t.update({Q_NAME: np.zeros((64, 48), np.float32)}))
    assert _equals(directory, tensors)


def test_b92_without_an_index_duplicates_are_an_error(sharded):
    directory, tensors = sharded
    (directory / INDEX).unlink()
    assert _equals(directory, tensors)  # files that share no name are one model
    save_file({Q_NAME: np.zeros((64, 48), np.float32)}, directory / "old.safetensors")
    _refused(directory, rf"'{Q_NAME}' is in .*old\.safetensors.*remove the stale file")


def test_b91_missing_shard(sharded):
    (sharded[0] / SECOND).unlink()
    _refused(sharded[0], rf"{SECOND} is missing")


def test_b91_tensor_missing_from_its_shard(sharded):
    file = json.loads((sharded[0] / INDEX).read_text())["weight_map"][Q_NAME]
    _edit(sharded[0] / file, lambda t: t.pop(Q_NAME))
    _refused(sharded[0], rf"1 tensors in files that lack them: {Q_NAME} \({file}\)")


def test_b91_tensor_missing_from_the_index(sharded):
    index = json.loads((sharded[0] / INDEX).read_text())
    del index["weight_map"][Q_NAME]
    (sharded[0] / INDEX).write_text(json.dumps(index))
    _refused(sharded[0], rf"1 tensors are missing: {Q_NAME}\.")


def _single(tmp_path, change=lambda t: None, dtype=np.float32):
    _, tensors = hf_tensors(LLAMA)
    change(tensors)
    write_hf(tmp_path, LLAMA, tensors, dtype)
    return tmp_path


def test_b91_missing_extra_and_misshapen_tensors_in_one_message(tmp_path):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(16, np.float32)
        tensors[Q_NAME] = tensors[Q_NAME].T.copy()

    with pytest.raises(ValueError) as caught:
        load_model(_single(tmp_path, change), "float32")
    message = str(caught.value)
    assert "1 tensors are missing: model.norm.weight" in message
    assert "belong to no parameter: model.layers.0.self_attn.q_norm.weight" in message
    assert f"tensor '{Q_NAME}'" in message
    assert "(48, 64), layers.1.mixer.wq_NHD needs (4, 16, 48)" in message


@pytest.mark.parametrize("shape", [(64,), (64, 47), (63, 48), (48, 64), (64, 48, 1, 2), (3072,)])
def test_b91_wrong_shape(tmp_path, shape):
    _single(tmp_path, lambda t: t.update({Q_NAME: np.zeros(shape, np.float32)}))
    _refused(tmp_path, "wrong shapes.*q_proj")


def test_b91_wrong_dtype(tmp_path):
    _single(tmp_path)
    _edit(tmp_path / "model.safetensors", lambda t: t.update({Q_NAME: t[Q_NAME].astype(np.int8)}))
    _refused(tmp_path, rf"'{Q_NAME}' \(dtype I8\): only F64, F32, F16, BF16 can be loaded")


def test_b91_long_lists_are_cut(tmp_path):
    def change(tensors):
        for i in range(40):
            tensors[f"extra.{i:02d}"] = np.ones(1, np.float32)

    _single(tmp_path, change)
    with pytest.raises(ValueError, match=r"40 tensors belong.*extra\.09, \.\.\.") as caught:
        load_model(tmp_path, "float32")
    assert "extra.10" not in str(caught.value)


def test_b91_file_cut_at_any_length(tmp_path):
    whole = (_single(tmp_path) / "model.safetensors").read_bytes()
    for length in [*range(0, 400, 13), *np.linspace(400, len(whole) - 1, 40).astype(int)]:
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        _refused(tmp_path, r"model\.safetensors is no sound safetensors file")


def _file(header: dict, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(start: int, stop: int, shape=(2,), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "data",
    [
        _file({"a": _entry(0, 8), "b": _entry(0, 8)}, bytes(8)),
        _file({"a": _entry(0, 8), "b": _entry(4, 12)}, bytes(12)),
        _file({"a": _entry(0, 8), "b": _entry(16, 24)}, bytes(24)),
        _file({"a": _entry(0, 8)}, bytes(7)),
        _file({"a": _entry(0, 8)}, bytes(9)),
        _file({"a": _entry(8, 0)}, bytes(8)),
        _file({"a": _entry(0, 8, shape=(3,))}, bytes(8)),
        _file({"a": _entry(0, 8, shape=(2**62, 8))}, bytes(8)),
        _file({"a": _entry(0, 2**63)}, bytes(8)),
        _file({"a": _entry(0, 8, dtype="X7")}, bytes(8)),
        _file({"a": {"dtype": "F32"}}, bytes(8)),
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 40) + b"{}",
        struct.pack("<Q", 4) + b"[1,]" + bytes(8),
        struct.pack("<Q", 2) + b"\xff\xff",
        b"",
        b"\x80\x02}",
    ],
)
def test_lying_header_is_refused(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors is no sound safetensors file"):
        open_safetensors(tmp_path)


def test_flipped_header_bytes_load_or_are_refused(tmp_path):
    whole = (_single(tmp_path) / "model.safetensors").read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        data[int(rng.integers(0, header))] ^= 1 << int(rng.integers(8))
        (tmp_path / "model.safetensors").write_bytes(data)
        try:
            load_model(tmp_path, "float32")
        except ValueError:
            refused += 1
    assert refused > 250  # padding spaces and the free-text metadata may change


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ("[]", "holds no weight_map"),
        ("{", "holds no weight_map"),
        ("[" * 100_000, "holds no weight_map"),
        ('{"weight_map": 3}', "holds no weight_map"),
        ('{"weight_map": {"a": 3}}', "must name a file"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "lie beside their index"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors is missing"),
    ],
)
def test_bad_index_is_refused(tmp_path, weight_map, message):
    _single(tmp_path)
    (tmp_path / INDEX).write_text(weight_map)
    _refused(tmp_path, message)


@pytest.mark.parametrize("stored", [np.float64, np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("loaded", ["float32", "bfloat16"])
def test_dtypes_are_converted(tmp_path, stored, loaded):
    _single(tmp_path, dtype=stored)
    _, tensors = hf_tensors(LLAMA)
    _, params = load_model(tmp_path, loaded)
    expected = tensors[Q_NAME].astype(stored).astype(loaded)
    wq = np.asarray(params.layers[1].mixer.wq_NHD).reshape(64, 48)
    assert wq.dtype == np.dtype(loaded)
    np.testing.assert_array_equal(bits(wq), bits(expected))
    assert params.final_norm.scale.dtype == np.float32  # norms stay float32


def test_directory_that_holds_no_model(tmp_path):
    _refused(tmp_path / "absent", "no model directory and no .gguf file")
    _refused(tmp_path, "has no config.json; point to a model's own directory")
    (tmp_path / "m-Q4_0.gguf").touch()
    _refused(tmp_path, r"has no config.json; point to one of its files \(m-Q4_0\.gguf\)")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").touch()
    _refused(tmp_path, "holds no .safetensors file but m-Q4_0.gguf, pytorch_model.bin")


def test_more_layers_than_tensors_are_refused_before_they_are_built(tmp_path):
    _, tensors = hf_tensors(LLAMA)
    write_hf(tmp_path, {**LLAMA, "num_hidden_layers": 10**9}, tensors)
    _refused(tmp_path, "1000000000 layers, but there are 30 tensors")


def test_bare_base_model_without_prefix(tmp_path):
    _, tensors = hf_tensors({**LLAMA, "tie_word_embeddings": True})
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    write_hf(tmp_path, {**LLAMA, "tie_word_embeddings": True}, bare)
    assert _equals(tmp_path, tensors)


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_b69_tied_model_uses_the_embedding(tmp_path, head):
    fields = {**LLAMA, "tie_word_embeddings": True}
    _, tensors = hf_tensors(fields)
    embedding = tensors["model.embed_tokens.weight"]
    if head != "absent":
        tensors["lm_head.weight"] = embedding * (1 if head == "equal" else 2)
    write_hf(tmp_path, fields, tensors)
    if head == "different":
        with pytest.warns(UserWarning, match="lm_head.weight.*differs from the embedding"):
            config, params = load_model(tmp_path, "float32")
    else:
        config, params = load_model(tmp_path, "float32")
    assert config.tied_embeddings
    assert params.unembed_VD is None
    np.testing.assert_array_equal(params.embed_VD, embedding)


def test_b69_untied_model_needs_its_own_matrix(tmp_path):
    _single(tmp_path, lambda t: t.pop("lm_head.weight"))
    _refused(tmp_path, r"missing: lm_head\.weight")


def test_parameters_and_sources_cover_each_other(tmp_path):
    _, params = load_model(_single(tmp_path), "float32")
    leaves = flatten(params)
    assert len(leaves) == 3 * 9 + 3
    assert all(isinstance(leaf, jax.Array) for leaf in leaves.values())
