"""Rotary frequencies and attention factors against transformers' own functions.

A float32 frequency may differ in its last bits where torch's vectorised power does not round
correctly; llama3's blend enlarges that to three. Dynamic scaling computes the grown theta in
float32 there and the growth of each frequency here; both are within a few ulp of the exact value.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from models.families import family_of_hf
from models.rope import attention_factor, inv_freq, rotation
from tests.parity.make_tiny import VARIANTS, build

THETAS = (10_000.0, 500_000.0, 1_000_000.0)
DIMS = (10, 24, 64, 96, 128, 256)
MAX_POSITION = 131072


def settings_of(kind, dim):
    original = {"original_max_position_embeddings": 4096}
    factors = np.random.default_rng(dim).uniform(1, 40, (2, dim // 2))
    short, long = (np.sort(f).tolist() for f in factors)
    return {
        "linear": [{"factor": 3.0}],
        "dynamic": [{"factor": 3.0}],
        "llama3": [
            {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
            {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0, **original},
        ],
        "yarn": [
            {"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0, **original},
            {"factor": 64.0, "attention_factor": 1.0, **original},
            {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0, **original},
            {"factor": 4.0, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0, **original},
        ],
        "longrope": [
            {"short_factor": short, "long_factor": long, **original},
            {"short_factor": short, "long_factor": long, "attention_factor": 1.25, **original},
        ],
    }[kind]


def both(kind, theta, dim, settings):
    """(transformers' config, our spec) of one model."""
    config = LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **settings},
    )
    fields = config.to_dict()
    return config, family_of_hf(fields).config_from_hf(fields).layers[0].mixer.rope


def ulps(a, b):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return np.abs(a.view(np.int32) - b.view(np.int32)).max()


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn", "longrope"])
def test_frequencies_and_attention_factor(kind):
    for dim in DIMS:
        for theta in THETAS:
            for settings in settings_of(kind, dim):
                config, spec = both(kind, theta, dim, settings)
                expected, factor = ROPE_INIT_FUNCTIONS[kind](config)
                assert ulps(inv_freq(spec), expected) <= 3, (dim, theta, settings)
                assert attention_factor(spec) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("theta", THETAS)
def test_longrope_above_the_original_length(theta):
    for settings in settings_of("longrope", 64):
        config, spec = both("longrope", theta, 64, settings)
        expected, _ = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=4097)
        assert ulps(inv_freq(spec, long=True), expected) <= 2


@pytest.mark.parametrize("length", [MAX_POSITION, MAX_POSITION + 1, 3 * MAX_POSITION])
def test_dynamic_above_the_maximum(length):
    config, spec = both("dynamic", 10_000.0, 64, {"factor": 3.0})
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=torch.tensor(length))
    cos_TR, sin_TR = rotation(spec, jnp.ones(1, jnp.int32), jnp.full(1, length, jnp.int32))
    np.testing.assert_allclose(np.arctan2(sin_TR[0], cos_TR[0]), expected, rtol=1e-6)


@pytest.mark.parametrize("part", [0.5, 0.75, 1.0])
def test_cos_and_sin_of_a_rotated_part(part):
    model = build("phi3_partial")
    model.config.rope_parameters["partial_rotary_factor"] = part
    fields = model.config.to_dict()
    spec = family_of_hf(fields).config_from_hf(fields).layers[0].mixer.rope
    positions = np.array([0, 1, 50, 20_000, 131_071])
    x = torch.zeros(1, len(positions), 1)
    expected = Phi3RotaryEmbedding(model.config)(x, torch.as_tensor(positions)[None])
    ours = rotation(spec, jnp.asarray(positions), jnp.asarray(positions + 1))
    for mine, theirs in zip(ours, expected, strict=True):
        assert spec.rotary_dim == theirs.shape[-1] == int(16 * part)
        np.testing.assert_allclose(mine, theirs[0, :, : spec.rotary_dim // 2], atol=3e-7)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_config_is_read_as_transformers_reads_it(name):
    """Scales and windows of the layers, from the reference's own modules."""
    model = build(name)
    fields = model.config.to_dict()
    config = family_of_hf(fields).config_from_hf(fields)
    attentions = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    assert len(attentions) == len(config.layers)
    for module, layer in zip(attentions, config.layers, strict=True):
        assert layer.mixer.scale == pytest.approx(module.scaling, rel=1e-12)
        assert layer.mixer.head_dim == module.head_dim
        if hasattr(module, "sliding_window"):
            assert layer.mixer.window == module.sliding_window
    assert sum(p.numel() for p in model.parameters()) == count(config)


def count(config):
    from models.model import declare
    from models.params import num_params

    return num_params(declare(config))
