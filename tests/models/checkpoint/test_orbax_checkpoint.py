"""Converted models saved and restored: exact, whole or refused."""

import dataclasses
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoint.config_json import MARKER, decode, encode
from models.checkpoint.load import load_model, read_config
from models.checkpoint.orbax import restore, save
from models.config import (
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelConfig,
    NormSpec,
    RopeSpec,
)
from models.model import declare
from models.params import abstract
from tests.tiny import tiny_config


def tiny_params(config: ModelConfig, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), abstract(declare(config), dtype)
    )


def _equal(a, b) -> bool:
    same = jax.tree.map(
        lambda x, y: x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y)), a, b
    )
    return all(jax.tree.leaves(same))


@pytest.fixture
def saved(tmp_path):
    config = tiny_config()
    params = tiny_params(config)
    save(tmp_path / "model", config, params)
    return tmp_path / "model", config, params


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_round_trip_is_exact(tmp_path, dtype):
    config = tiny_config(qk_norm="head", qkv_bias=True, sinks=True)
    params = tiny_params(config, dtype=dtype)
    save(tmp_path / "model", config, params)
    got_config, got_params = restore(tmp_path / "model")
    assert got_config == config
    assert jax.tree.structure(got_params) == jax.tree.structure(params)
    assert _equal(got_params, params)
    assert got_params.layers[0].mixer.sinks_N.dtype == jnp.float32


def test_load_model_recognises_and_converts(saved):
    path, config, params = saved
    assert read_config(path) == config
    got_config, got = load_model(path, "bfloat16")
    assert got_config == config
    assert got.final_norm.scale.dtype == jnp.float32
    np.testing.assert_array_equal(got.embed_VD, params.embed_VD.astype(jnp.bfloat16))


def test_a_place_that_cannot_be_is_named(saved, tmp_path):
    _, config, params = saved
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file/x cannot be made: Not a directory"):
        save(tmp_path / "file" / "x", config, params)


def test_existing_directory_is_kept_unless_asked(saved, tmp_path):
    path, config, params = saved
    other = jax.tree.map(lambda x: jnp.asarray(-np.asarray(x)), params)
    with pytest.raises(ValueError, match="exists already"):
        save(path, config, other)
    assert _equal(restore(path)[1], params)
    save(path, config, other, overwrite=True)
    assert _equal(restore(path)[1], other)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    (tmp_path / "thesis").mkdir()
    with pytest.raises(ValueError, match="not saved by Pallasite and will not be overwritten"):
        save(tmp_path / "thesis", config, params, overwrite=True)


def test_failed_save_leaves_nothing(tmp_path):
    config = tiny_config()
    wrong = tiny_params(tiny_config(head_dim=8, rope=RopeSpec(theta=1e4, rotary_dim=8)))
    with pytest.raises(ValueError, match=r"do not fit the config.*wq_NHD"):
        save(tmp_path / "model", config, wrong)
    assert not list(tmp_path.iterdir())


def test_every_damaged_file_is_refused(saved, tmp_path):
    path, _, _ = saved
    files = [p.relative_to(path) for p in path.rglob("*") if p.is_file() and p.name != MARKER]
    assert len(files) > 5
    for name in files:
        for damage in ("delete", "cut", "flip"):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(path, copy)
            data = bytearray((copy / name).read_bytes())
            if damage == "delete":
                (copy / name).unlink()
            elif damage == "cut":
                (copy / name).write_bytes(data[:-1])
            else:
                data[len(data) // 2] ^= 4
                (copy / name).write_bytes(data)
            with pytest.raises(ValueError, match=f"{name.name} (is missing|was changed)"):
                load_model(copy, "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(format=9), "format 9, this version reads 1"),
        (lambda v: v.pop("config"), "KeyError"),
        (lambda v: v.update(config=3), "holds no ModelConfig"),
        (lambda v: v["config"].update(type="NormSpec"), "damaged"),
        (lambda v: v["config"].update(type="Path"), "unknown record type 'Path'"),
        (lambda v: v["config"].update(extra=1), "unexpected keyword argument 'extra'"),
        (lambda v: v["config"].pop("width"), "width"),
        (lambda v: v["config"].update(width=0), "must all be positive"),
        (lambda v: v.update(checksums=None), "damaged"),
    ],
)
def test_damaged_marker_is_refused(saved, change, message):
    path, _, _ = saved
    value = json.loads((path / MARKER).read_text())
    change(value)
    (path / MARKER).write_text(json.dumps(value))
    with pytest.raises(ValueError, match=message):
        load_model(path, "float32")


@pytest.mark.parametrize(
    ("change", "name"), [({"tied_embeddings": True}, "unembed_VD"), ({"width": 65}, "embed_VD")]
)
def test_other_parameters_than_declared_are_refused(saved, change, name):
    path, config, _ = saved
    value = json.loads((path / MARKER).read_text())
    value["config"] = encode(dataclasses.replace(config, **change))
    (path / MARKER).write_text(json.dumps(value))
    with pytest.raises(ValueError, match=f"not hold what its config declares: {name}"):
        restore(path)


def test_foreign_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match="was not saved by Pallasite"):
        restore(tmp_path)


def test_config_survives_json_exactly():
    rope = RopeSpec(
        theta=0.1 + 0.2,
        rotary_dim=4,
        kind="longrope",
        original_max_position=7,
        short_factor=(1.0, math.pi),
        long_factor=(1e-30, 3e38),
        attention_factor=None,
    )
    layer = LayerSpec(
        AttentionSpec(2, 1, 4, 1 / 3, rope=rope, window=3, qk_norm="full"),
        MlpSpec(8, "plain", "gelu", bias=True),
        "sandwich",
    )
    bare = dataclasses.replace(layer, mixer=AttentionSpec(2, 2, 4, 0.5))
    config = ModelConfig(
        family="x",
        vocab_size=5,
        width=8,
        layers=(layer, bare),
        norm=NormSpec("layer", 1e-5, bias=True),
        max_position=7,
        eos_token_ids=(1, 2),
        bos_token_id=None,
    )
    got = decode(json.loads(json.dumps(encode(config))))
    assert got == config
    assert hash(got) == hash(config)
