"""GGUF metadata and names: the same model as a Hugging Face directory and as a GGUF file is the
same config and the same parameters. Names come from the gguf package's own table."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from models.checkpoint.load import load_model, read_config
from models.config import ModelConfig
from models.families.gguf import config_from_gguf
from models.rope import inv_freq
from tests.models.checkpoint.files import (
    BFLOAT16,
    MODELS,
    SMALL,
    SMALL_GGUF,
    as_gguf,
    gguf_and_hf_fields,
    hf_tensors,
    write_gguf,
    write_hf,
)

FACTORS = [1.0 + 0.25 * i for i in range(8)]


def _float32(config: ModelConfig) -> ModelConfig:
    """GGUF keeps numbers in float32."""
    return dataclasses.replace(
        config,
        norm=dataclasses.replace(config.norm, eps=float(np.float32(config.norm.eps))),
    )


@pytest.mark.parametrize("arch", MODELS)
def test_b78_b83_gguf_and_directory_are_the_same_model(tmp_path, arch):
    gguf_fields, hf_fields = gguf_and_hf_fields(arch)
    config, tensors = hf_tensors(hf_fields)
    # bfloat16 values: both files hold them exactly, and 1 + w is taken of the same w.
    tensors = {k: v.astype(BFLOAT16).astype(np.float32) for k, v in tensors.items()}
    write_hf(tmp_path / "hf", hf_fields, tensors, BFLOAT16)
    write_gguf(tmp_path / "m.gguf", arch, gguf_fields, as_gguf(arch, config, tensors))

    hf_config, hf_params = load_model(tmp_path / "hf", "float32")
    gguf_config, gguf_params = load_model(tmp_path / "m.gguf", "float32")
    assert _float32(gguf_config) == _float32(hf_config)
    assert jax.tree.structure(gguf_params) == jax.tree.structure(hf_params)
    for a, b in zip(jax.tree.leaves(gguf_params), jax.tree.leaves(hf_params), strict=True):
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_array_equal(a, b)
    if arch.startswith("gemma"):
        w = tensors["model.layers.0.input_layernorm.weight"]
        assert np.abs(w).max() > 15  # where bfloat16 has no room for the one
        np.testing.assert_array_equal(hf_params.layers[0].mixer_norm.scale, 1 + w)


def test_b78_heads_are_unpermuted_by_their_own_count(tmp_path):
    """Rows in converter order, checked against a table written out by hand: 4 query heads, 2
    key/value heads, head width 16; pair i of a head lies at rows 2i and 2i + 1."""
    config, tensors = hf_tensors({**SMALL, "model_type": "llama"})
    for name, value in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            value[:] = np.arange(len(value))[:, None]  # every row knows its place
    stored = as_gguf("llama", config, tensors)
    np.testing.assert_array_equal(stored["blk.0.attn_k.weight"][:6, 0], [0, 8, 1, 9, 2, 10])
    np.testing.assert_array_equal(stored["blk.0.attn_k.weight"][16:20, 0], [16, 24, 17, 25])
    write_gguf(tmp_path / "m.gguf", "llama", SMALL_GGUF, stored)
    _, params = load_model(tmp_path / "m.gguf", "float32")
    mixer = params.layers[0].mixer
    np.testing.assert_array_equal(mixer.wq_NHD[..., 0], np.arange(64).reshape(4, 16))
    np.testing.assert_array_equal(mixer.wk_KHD[..., 0], np.arange(32).reshape(2, 16))


class FakeStore:
    """Names, shapes and values in memory."""

    path = Path("fake")

    def __init__(self, **arrays):
        self.arrays = {"token_embd.weight": np.zeros((97, 48), np.float32)}
        for i in range(70):
            self.arrays[f"blk.{i}.x"] = np.zeros(1, np.float32)
        self.arrays |= arrays

    def names(self):
        return self.arrays.keys()

    def shape(self, name):
        return self.arrays[name].shape

    def read(self, name):
        return self.arrays[name]

    def where(self, name):
        return f"fake: tensor {name!r}"


def _config(arch: str, store: FakeStore | None = None, **changes) -> ModelConfig:
    """`changes` use __ for a dot; None removes a field."""
    fields = {"general.architecture": arch}
    for key, value in (
        gguf_and_hf_fields(arch)[0] | {k.replace("__", "."): v for k, v in changes.items()}
    ).items():
        if value is not None:
            fields[key if key.startswith("tokenizer.") else f"{arch}.{key}"] = value
    return config_from_gguf(fields, store or FakeStore())


def _mixers(config: ModelConfig) -> list:
    return [layer.mixer for layer in config.layers]


def test_rope_freqs_divide_the_frequencies():
    divisors = np.asarray(FACTORS, np.float32)
    store = FakeStore(**{"rope_freqs.weight": divisors})
    rope = _mixers(_config("llama", store))[0].rope
    plain = _mixers(_config("llama"))[0].rope
    assert rope.attention_factor == 1.0
    for long in (False, True):
        np.testing.assert_allclose(inv_freq(rope, long), inv_freq(plain) / divisors, rtol=3e-7)


def test_linear_scaling_multiplies_the_divisors():
    store = FakeStore(**{"rope_freqs.weight": np.asarray(FACTORS, np.float32)})
    rope = _mixers(_config("llama", store, rope__scaling__factor=4.0))[0].rope
    assert rope.short_factor == rope.long_factor == tuple(4 * f for f in FACTORS)
    with pytest.raises(ValueError, match=r"'yarn' with factor 4\.0 and rotary divisors"):
        _config("llama", store, rope__scaling__factor=4.0, rope__scaling__type="yarn")


def test_short_and_long_factors_are_longrope():
    store = FakeStore(
        **{
            "rope_factors_short.weight": np.asarray(FACTORS, np.float32),
            "rope_factors_long.weight": 2 * np.asarray(FACTORS, np.float32),
        }
    )
    changes = {
        "rope__scaling__original_context_length": 64,
        "rope__scaling__attn_factor": 1.25,
    }
    rope = _mixers(_config("phi3", store, **changes))[0].rope
    assert (rope.kind, rope.original_max_position, rope.attention_factor) == ("longrope", 64, 1.25)
    assert rope.short_factor == tuple(FACTORS)
    assert rope.long_factor == tuple(2 * f for f in FACTORS)


def test_yarn_linear_and_none():
    yarn = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 64,
    }
    rope = _mixers(_config("qwen2", **yarn))[0].rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 64)
    assert rope.attention_factor == pytest.approx(1.1386294361)  # 0.1 ln 4 + 1
    rope = _mixers(_config("llama", rope__scaling__factor=8.0))[0].rope
    assert (rope.kind, rope.factor) == ("linear", 8.0)
    rope = _mixers(_config("llama", rope__scale_linear=8.0))[0].rope
    assert (rope.kind, rope.factor) == ("linear", 8.0)
    rope = _mixers(_config("llama", rope__scaling__type="none"))[0].rope
    assert rope.kind == "default"


def test_partial_rotary():
    rope = _mixers(_config("phi3", rope__dimension_count=12))[0].rope
    assert rope.rotary_dim == 12


def test_gemma3_local_layers_have_their_own_rope():
    mixers = _mixers(_config("gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0))
    assert [m.window for m in mixers] == [7] * 5 + [None, 7]
    assert {(m.rope.theta, m.rope.kind) for m in mixers if m.window} == {(10_000.0, "default")}
    assert (mixers[5].rope.theta, mixers[5].rope.kind) == (50_000.0, "linear")
    mixers = _mixers(_config("gemma3", rope__freq_base_swa=20_000.0))
    assert mixers[0].rope.theta == 20_000.0


def test_window_pattern_from_the_file():
    pattern = [True, False, True, True, False, True, False]
    windows = [
        m.window for m in _mixers(_config("gemma3", attention__sliding_window_pattern=pattern))
    ]
    assert windows == [7 if is_local else None for is_local in pattern]
    windows = [m.window for m in _mixers(_config("gemma3", attention__sliding_window_pattern=2))]
    assert windows == [7, None, 7, None, 7, None, 7]
    assert {m.window for m in _mixers(_config("gemma3", attention__sliding_window=None))} == {None}


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_gemma_27b_scales_by_width_over_heads(arch, layers):
    config = _config(arch, block_count=layers)
    assert config.layers[0].mixer.scale == pytest.approx((48 / 4) ** -0.5)
    assert _config(arch).layers[0].mixer.scale == pytest.approx(16**-0.5)


def test_gemma2_softcaps():
    config = _config("gemma2")
    assert (config.layers[0].mixer.softcap, config.final_softcap) == (50.0, 30.0)
    config = _config("gemma2", attn_logit_softcapping=20.0, final_logit_softcapping=10.0)
    assert (config.layers[0].mixer.softcap, config.final_softcap) == (20.0, 10.0)
    assert _config("gemma3").final_softcap is None


def test_smollm3_leaves_every_fourth_layer_unrotated():
    assert [m.rope is None for m in _mixers(_config("smollm3"))] == [
        False,
        False,
        False,
        True,
        False,
    ]


def test_ends_of_turn_and_message_end_generation():
    ids = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2}
    assert _config("llama", **ids).eos_token_ids == (2, 9)


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("llama", {"expert_count": 8}, "llama.expert_count = 8 is not supported"),
        ("llama", {"logit_scale": 2.0}, "logit_scale"),
        ("llama", {"attention__causal": False}, "attention.causal"),
        ("llama", {"block_count": 10**9}, "block_count is 1000000000"),
        ("llama", {"block_count": "3"}, "block_count must be one integer"),
        ("llama", {"embedding_length": None}, "embedding_length must be one integer.*missing"),
        ("llama", {"attention__head_count": [4, 8]}, "head_count must be one integer"),
        ("llama", {"attention__value_length": 8}, "value_length 8 differs"),
        ("llama", {"attention__layer_norm_rms_epsilon": float("nan")}, "must be a number"),
        ("llama", {"rope__freq_base": -1.0}, "rope.freq_base must be a number"),
        ("llama", {"rope__dimension_count": 15}, "rotary_dim must be even"),
        ("llama", {"rope__scaling__type": "ntk"}, "scaling.type = 'ntk'"),
        ("llama", {"rope__scaling__type": "longrope"}, "without its tensors"),
        ("qwen2", {"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier = 0.1"),
        ("qwen2", {"attention__sliding_window": 8}, "sliding_window = 8 is not supported"),
        ("gemma3", {"attention__sliding_window_pattern": [True]}, "1 entries for 7 layers"),
        ("llama", {"tokenizer.ggml.tokens": ["a"] * 98}, "98 tokens, the embedding has 97"),
        ("llama", {"tokenizer.ggml.eos_token_id": -1}, "eos_token_id must be a token id"),
    ],
)
def test_unusable_metadata_is_refused_by_name(arch, changes, message):
    with pytest.raises(ValueError, match=message):
        _config(arch, **changes)


def test_bad_rotary_divisors_are_refused():
    for bad, message in [([1.0] * 7, "needs \\(8,\\)"), ([1.0] * 7 + [0.0], "positive")]:
        store = FakeStore(**{"rope_freqs.weight": np.asarray(bad, np.float32)})
        with pytest.raises(ValueError, match=message):
            _config("llama", store)


def test_unknown_architecture_is_refused_by_name(tmp_path):
    write_gguf(tmp_path / "m.gguf", "mamba", SMALL_GGUF, {"token_embd.weight": np.zeros((4, 4))})
    with pytest.raises(ValueError, match=r"m\.gguf.*'mamba'.*llama"):
        read_config(tmp_path / "m.gguf")


def test_leftover_tensor_in_a_gguf_is_refused(tmp_path):
    config, tensors = hf_tensors({**SMALL, "model_type": "llama"})
    stored = as_gguf("llama", config, tensors) | {"blk.0.attn_sinks.weight": np.ones(4)}
    write_gguf(tmp_path / "m.gguf", "llama", SMALL_GGUF, stored)
    with pytest.raises(ValueError, match=r"belong to no parameter: blk\.0\.attn_sinks\.weight"):
        load_model(tmp_path / "m.gguf", "float32")
