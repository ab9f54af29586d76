"""Reading config.json: every spelling gives the same config, what is not supported is refused."""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoint.assemble import apply_source
from models.families import FAMILIES, family_of_gguf, family_of_hf, read_fields
from models.model import declare
from models.params import flatten

GOLDENS = Path(__file__).parent.parent / "parity" / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
BASE = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def read(fields=None, **changes):
    fields = {**(fields or BASE), **changes}
    return family_of_hf(fields).config_from_hf(fields)


def mixer(**changes):
    return read(**changes).layers[0].mixer


def windows(**changes):
    return [layer.mixer.window for layer in read(**changes).layers]


def test_families_are_the_ones_promised():
    model_types = {name for family in FAMILIES for name in family.model_types}
    assert model_types == {
        "llama",
        "mistral",
        "smollm3",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "gpt2",
    }


@pytest.mark.parametrize("model_type", ["mixtral", None])
def test_unknown_model_type_is_refused_by_name(model_type):
    with pytest.raises(
        ValueError, match=rf"{model_type!r} is not supported; known: llama, mistral"
    ):
        read(model_type=model_type)


def test_unknown_gguf_architecture_is_refused_by_name():
    assert family_of_gguf("qwen2").name == "qwen2"
    with pytest.raises(ValueError, match=r"'mamba' is not supported; known: llama, "):
        family_of_gguf("mamba")


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_its_own_place_in_the_file(name):
    fields = read_fields(GOLDENS / name)
    family = family_of_hf(fields)
    config = family.config_from_hf(fields)
    sources = family.hf_sources(config)
    assert sources.keys() == flatten(declare(config)).keys()
    assert len({(source.name, source.rows) for source in sources.values()}) == len(sources)
    assert all(s.name.startswith((family.hf_prefix, "lm_head")) for s in sources.values())


def test_b80_head_dim_is_taken_as_written():
    explicit = mixer(head_dim=16)
    assert (explicit.head_dim, explicit.scale, explicit.rope.rotary_dim) == (16, 0.25, 16)
    params = flatten(declare(read(head_dim=16)))
    assert params["layers.0.mixer.wq_NHD"].shape == (4, 16, 40)
    assert params["layers.0.mixer.wo_DA"].shape == (40, 64)


@pytest.mark.parametrize("changes", [{}, {"head_dim": None}])
def test_b80_head_dim_falls_back_to_the_quotient(changes):
    assert mixer(**changes).head_dim == 10
    assert mixer(**changes).scale == 10**-0.5


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "gemma3_text"])
def test_b80_families_with_a_head_dim_of_their_own(model_type):
    assert mixer(model_type=model_type).head_dim == (128 if model_type == "qwen3" else 256)
    assert mixer(model_type=model_type, head_dim=12).head_dim == 12


def test_b80_indivisible_width_needs_a_head_dim():
    with pytest.raises(ValueError, match=r"hidden_size 40 .* num_attention_heads 3"):
        read(num_attention_heads=3, num_key_value_heads=3)


def test_gemma_scale_is_that_of_query_pre_attn_scalar():
    config = read(model_type="gemma2", head_dim=16, query_pre_attn_scalar=100)
    assert config.layers[0].mixer.scale == pytest.approx(0.1)


def test_b88_qwen2_has_biases_without_saying_so():
    for changes in ({}, {"attention_bias": False}):
        spec = mixer(model_type="qwen2", **changes)
        assert (spec.qkv_bias, spec.out_bias) == (True, False)
    sources = family_of_hf({"model_type": "qwen2"}).hf_sources(read(model_type="qwen2"))
    assert sources["layers.3.mixer.bk_KH"].name == "model.layers.3.self_attn.k_proj.bias"
    assert "layers.0.mixer.bo_D" not in sources


@pytest.mark.parametrize("model_type", ["llama", "smollm3", "qwen3", "olmo2", "gemma2"])
def test_b88_attention_bias_is_all_four(model_type):
    assert not mixer(model_type=model_type).qkv_bias
    spec = mixer(model_type=model_type, attention_bias=True)
    assert spec.qkv_bias
    assert spec.out_bias


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def test_b73_every_spelling_of_a_scaled_rope_is_read():
    spec = mixer(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}).rope
    assert (spec.kind, spec.theta, spec.factor, spec.original_max_position) == (
        "llama3",
        5e5,
        8.0,
        1024,
    )
    outside = {k: v for k, v in LLAMA3.items() if not k.startswith("original")}
    for changes in (
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {
            "rope_theta": 5e5,
            "original_max_position_embeddings": 1024,
            "rope_scaling": {"type": "llama3", **outside},
        },
        {
            "rope_theta": 5e5,
            "original_max_position_embeddings": 1024,
            "rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": 7},
        },
    ):
        assert mixer(**changes).rope == spec


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": None}, {"rope_scaling": {}}])
def test_an_absent_rope_is_the_default_one(changes):
    assert mixer(**changes).rope.kind == "default"
    assert mixer(**changes).rope.theta == 10_000.0
    assert mixer(model_type="smollm3", **changes).rope.theta == 2_000_000.0


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "mrope", "mrope_section": [1]}, r"'mrope' is not supported; known: default"),
        ({"type": "ntk", "factor": 2.0}, "'ntk' is not supported"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 32}, "'linear' has no setting beta_fast"),
        ({"type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta"),
        ({"type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "alpha"),
        ({"factor": 2.0}, "'default' has no setting factor"),
        ({"type": "linear"}, "factor is missing"),
        ({"type": "linear", "factor": "2"}, r"factor must be a number, got '2'"),
        ({"type": "linear", "factor": -2.0}, "factor must be positive"),
        ({"type": "linear", "factor": math.nan}, "factor must be positive and finite"),
        ({"type": "llama3", **LLAMA3, "low_freq_factor": None}, "low_freq_factor is missing"),
        ({"type": "longrope"}, "longrope needs short_factor"),
        ({"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("linear", "rope_scaling must be an object"),
    ],
)
def test_b73_unknown_rope_settings_are_refused_by_name(rope, message):
    with pytest.raises(ValueError, match=message):
        read(rope_scaling=rope)


def test_two_ropes_that_differ_are_refused():
    rope = {"rope_type": "linear", "factor": 2.0}
    assert mixer(rope_scaling=rope, rope_parameters=rope).rope.factor == 2.0
    with pytest.raises(ValueError, match="both given and differ"):
        read(rope_scaling=rope, rope_parameters={"rope_theta": 1e6})


def test_b75_max_position_is_the_one_written():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = read(rope_scaling=rope)
    assert config.max_position == config.layers[0].mixer.rope.max_position == 4096
    # Without an original length it is the one written, and the factor stays the one given.
    spec = mixer(rope_scaling={"rope_type": "yarn", "factor": 4.0}).rope
    assert (spec.original_max_position, spec.factor) == (4096, 4.0)
    # Without a factor it is the ratio of the two lengths.
    del rope["factor"]
    assert mixer(rope_scaling=rope).rope.factor == 4.0


def test_b75_yarn_settings_are_read():
    rope = {"rope_type": "yarn", "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0}
    spec = mixer(rope_scaling=rope | {"truncate": False, "beta_fast": 8, "beta_slow": 2}).rope
    assert (spec.mscale, spec.mscale_all_dim, spec.attention_factor) == (1.0, None, None)
    assert (spec.truncate, spec.beta_fast, spec.beta_slow) == (False, 8.0, 2.0)
    assert mixer(rope_scaling=rope | {"attention_factor": 1.0}).rope.attention_factor == 1.0


PHI3 = BASE | {"model_type": "phi3", "max_position_embeddings": 131072}


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phi3_longrope(kind):
    rope = {
        "type": kind,
        "short_factor": [1.0] * 5,
        "long_factor": [float(i + 1) for i in range(5)],
    }
    spec = read(PHI3, rope_scaling=rope).layers[0].mixer.rope
    assert spec.kind == "longrope"
    assert (spec.original_max_position, spec.factor) == (4096, 32.0)
    assert spec.long_factor == (1.0, 2.0, 3.0, 4.0, 5.0)
    with pytest.raises(ValueError, match=r"longrope long_factor needs 5 values, got 4"):
        read(PHI3, rope_scaling=rope | {"long_factor": [1.0] * 4})


def test_phi3_rotates_a_part_of_each_head():
    for changes in (
        {"partial_rotary_factor": 0.8},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.8}},
    ):
        assert read(PHI3, **changes).layers[0].mixer.rope.rotary_dim == 8
    with pytest.raises(ValueError, match=r"rope kind 'linear' is not supported for phi3"):
        read(PHI3, rope_scaling={"type": "linear", "factor": 2.0})


GEMMA3 = BASE | {"model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 7}


def test_gemma3_local_and_global_rotation():
    old = read(
        GEMMA3,
        rope_theta=1e6,
        rope_local_base_freq=5e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=6,
    )
    new = read(
        GEMMA3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    )
    assert old == new
    kinds = [(m.window, m.rope.theta, m.rope.factor) for m in (la.mixer for la in new.layers)]
    local, full = (4096, 5e3, 1.0), (None, 1e6, 8.0)
    assert kinds == [local] * 5 + [full, local]
    defaults = {layer.mixer.rope.theta for layer in read(GEMMA3).layers}
    assert defaults == {10_000.0, 1_000_000.0}


def test_gemma3_flat_rope_parameters_are_refused():
    with pytest.raises(ValueError, match=r"must hold full_attention and sliding_attention"):
        read(GEMMA3, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "mistral"}, [4096] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 8}, [None] * 4),
        ({"model_type": "qwen2", "use_sliding_window": True}, [None] * 4),  # from layer 28 on
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 3,
            },
            [None, None, None, 8],
        ),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [8, None, 8, None],
        ),
        ({"model_type": "gemma2", "sliding_window": 8}, [8, None, 8, None]),
        ({"model_type": "phi3"}, [None] * 4),
        ({"model_type": "phi3", "sliding_window": 2047}, [2047] * 4),
        ({"model_type": "smollm3", "sliding_window": 8}, [None] * 4),
        (
            {"model_type": "smollm3", "sliding_window": 8, "use_sliding_window": True},
            [None, None, None, 8],
        ),
    ],
)
def test_b82_windows_as_each_family_has_them(changes, expected):
    assert windows(**changes) == expected


def test_smollm3_layers_without_rotation():
    def rotates(**changes):
        layers = read(model_type="smollm3", **changes).layers
        return [layer.mixer.rope is not None for layer in layers]

    assert rotates() == [True, True, True, False]
    assert rotates(no_rope_layers=[0, 1, 0, 1]) == [False, True, False, True]
    with pytest.raises(ValueError, match="no_rope_layers must hold 0 or 1 for 4 layers"):
        rotates(no_rope_layers=[1, 2, 3, 4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config = .*awq.* llama"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"hidden_act": "xielu"}, "hidden_act = 'xielu' is not supported; known: silu"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias = True"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
        (
            {"model_type": "qwen2", "layer_types": ["linear_attention"] * 4},
            "layer_types names linear_attention",
        ),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "1 entries for 4 layers"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, "needs a sliding_win"),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        read(**changes)


def test_fields_that_change_nothing_pass():
    neutral = {
        "quantization_config": None,
        "num_local_experts": 0,
        "layer_types": None,
        "partial_rotary_factor": 1.0,
        "use_qk_norm": False,
        "some_note": "of no meaning",
    }
    assert read(**neutral) == read()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be an integer >= 1, got 0"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers must be an integer >= 1, got 'four'"),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3"),
        ({"head_dim": 9}, "rotary_dim must be even and positive, got 9"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be positive"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id must be a token id .* got \[2, -1\]"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be an integer >= 1"),
    ],
)
def test_wrong_values_are_refused_with_the_limit(changes, message):
    with pytest.raises(ValueError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu", "gelu"),
        ("relu", "relu"),
        ("silu", "silu"),
    ],
)
def test_activation_names(name, kind):
    assert read(hidden_act=name).layers[0].mlp.activation == kind


def test_gpt2_defaults():
    config = read({"model_type": "gpt2"}, n_layer=2)
    assert config.layers[0].mlp.width == 4 * 768
    assert config.layers[0].mlp.activation == "gelu_tanh"
    assert config.layers[0].mixer.rope is None
    assert read({"model_type": "gpt2"}, scale_attn_weights=False).layers[0].mixer.scale == 1.0


def test_b83_gemma_scales_are_offsets_from_one_added_in_float32():
    config = read(GEMMA3)
    sources, params = family_of_hf(GEMMA3).hf_sources(config), flatten(declare(config))
    offsets = {path for path, source in sources.items() if source.add}
    assert offsets == {path for path in params if path.endswith("norm.scale")}
    path = "layers.0.mixer.q_norm.scale"
    stored = np.full(16, 15.8125, jnp.bfloat16)  # 16.8125 is no bfloat16 number
    loaded = apply_source(
        sources[path], stored, params[path], params[path].resolve_dtype("bfloat16")
    )
    np.testing.assert_array_equal(loaded, np.full(16, 16.8125, np.float32))


def write(directory, name, fields):
    (directory / name).write_text(json.dumps(fields), encoding="utf-8")


def test_ends_of_sequence_are_the_union_of_both_files(tmp_path):
    write(tmp_path, "config.json", BASE | {"eos_token_id": 5})
    assert read(read_fields(tmp_path)).eos_token_ids == (5,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [9, 5, 7]})
    assert read(read_fields(tmp_path)).eos_token_ids == (5, 7, 9)
    write(tmp_path, "config.json", BASE)
    assert read(read_fields(tmp_path)).eos_token_ids == (2, 5, 7, 9)
    write(tmp_path, "generation_config.json", {})
    assert read(read_fields(tmp_path)).eos_token_ids == (2,)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_broken_json_is_refused_with_its_path(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        read_fields(tmp_path)
