"""Rotary embedding against float64 formulas written from the papers (tests/parity compares with
transformers). Frequencies are float32 numbers made from float32 exponents, so they are within
ln(theta) * 2^-24 + 3 ulp of the exact ones, 1.2e-6 at theta 1e6."""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from models.config import RopeSpec
from models.rope import apply_rope, attention_factor, inv_freq, rotation

LLAMA3 = RopeSpec(
    theta=500_000.0,
    rotary_dim=128,
    kind="llama3",
    max_position=131072,
    original_max_position=8192,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
YARN = RopeSpec(
    theta=10_000.0,
    rotary_dim=128,
    kind="yarn",
    max_position=131072,
    original_max_position=4096,
    factor=32.0,
)
LONGROPE = RopeSpec(
    theta=10_000.0,
    rotary_dim=8,
    kind="longrope",
    max_position=131072,
    original_max_position=4096,
    factor=32.0,
    short_factor=(1.0, 1.1, 1.2, 1.3),
    long_factor=(1.0, 4.0, 16.0, 32.0),
)
DYNAMIC = RopeSpec(theta=10_000.0, rotary_dim=64, kind="dynamic", max_position=4096, factor=2.0)
POSITIONS = np.array([0, 1, 50, 1000, 20_000, 131_071])


def plain(theta, dim):
    return theta ** (-np.arange(0, dim, 2) / dim)


def rotate(spec, position, length):
    cos_TR, sin_TR = rotation(spec, jnp.array([position]), jnp.array([length]))
    return np.asarray(cos_TR)[0], np.asarray(sin_TR)[0]


@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6, 5e6])
@pytest.mark.parametrize("dim", [10, 24, 64, 128, 256])
def test_default_and_linear_frequencies(theta, dim):
    spec = RopeSpec(theta=theta, rotary_dim=dim)
    np.testing.assert_allclose(inv_freq(spec), plain(theta, dim), rtol=1.5e-6)
    np.testing.assert_allclose(
        inv_freq(replace(spec, kind="linear", factor=8.0)), plain(theta, dim) / 8, rtol=1.5e-6
    )


def test_b73_llama3_bands():
    ratio = inv_freq(LLAMA3) / plain(5e5, 128)
    unchanged, divided = np.abs(ratio - 1) < 2e-6, np.abs(ratio - 1 / 8) < 1e-6
    assert (unchanged.sum(), divided.sum()) == (29, 29)
    blended = ~unchanged & ~divided
    assert blended.sum() == 6
    # In between, the share that is kept is linear in the turns made in the original length.
    turns = 8192 * plain(5e5, 128)[blended] / (2 * math.pi)
    keep = (turns - 1) / (4 - 1)
    np.testing.assert_allclose(ratio[blended], (1 - keep) / 8 + keep, rtol=1e-5)


@pytest.mark.parametrize("spec", [LLAMA3, YARN, replace(LLAMA3, kind="linear")])
def test_b73_scaled_angles_far_out(spec):
    """cos and sin are those of the float32 product, to the last bits; the product itself is within
    position * (2^-24 + the frequency's own error) of the exact angle."""
    length = np.full_like(POSITIONS, 131072)
    cos_TR, sin_TR = rotation(spec, jnp.asarray(POSITIONS), jnp.asarray(length))
    factor = attention_factor(spec)
    angle_TR = (POSITIONS[:, None].astype(np.float32) * inv_freq(spec)).astype(np.float64)
    np.testing.assert_allclose(cos_TR, factor * np.cos(angle_TR), atol=3e-7)
    np.testing.assert_allclose(sin_TR, factor * np.sin(angle_TR), atol=3e-7)
    exact_TR = POSITIONS[:, None] * inv_freq(spec).astype(np.float64)
    assert (np.abs(angle_TR - exact_TR) <= POSITIONS[:, None] * 2.0**-24).all()


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    exact = plain(1e4, 128)
    turns = 4096 * exact / (2 * math.pi)
    ratio = inv_freq(YARN) / exact
    # Rounding the ramp's ends outwards to whole pairs moves them by less than one pair.
    np.testing.assert_allclose(ratio[turns > 32 * 1.16], 1, rtol=2e-6)
    np.testing.assert_allclose(ratio[turns < 1 / 1.16], 1 / 32, rtol=2e-6)
    assert (np.diff(ratio) <= 1e-6).all()


def test_yarn_ramp_without_truncation():
    spec = replace(YARN, truncate=False)

    def pair(turns):
        return 128 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(1e4))

    first, last = pair(32), pair(1)
    ramp = np.clip((np.arange(64) - first) / (last - first), 0, 1)
    expected = plain(1e4, 128) * ((1 - ramp) + ramp / 32)
    np.testing.assert_allclose(inv_freq(spec), expected, rtol=3e-6)
    # With it the ramp starts and ends at whole pairs.
    first, last = math.floor(first), math.ceil(last)
    ramp = np.clip((np.arange(64) - first) / (last - first), 0, 1)
    expected = plain(1e4, 128) * ((1 - ramp) + ramp / 32)
    np.testing.assert_allclose(inv_freq(YARN), expected, rtol=3e-6)


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 16.0}, 1.2773),
        ({"factor": 64.0, "attention_factor": 1.0}, 1.0),
        ({"factor": 64.0}, 1.4159),
        ({"factor": 40.0}, 1.3689),
        ({"factor": 40.0, "mscale": 0.707}, 1.3689),
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}, 1.36889 / 1.26080),
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 0.5}, 0.5),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_b75_yarn_attention_factor(settings, factor):
    spec = replace(YARN, **settings)
    assert attention_factor(spec) == pytest.approx(factor, abs=1e-4)
    cos_R, sin_R = rotate(spec, 0, 1)
    np.testing.assert_allclose(cos_R, factor, atol=1e-4)
    np.testing.assert_array_equal(sin_R, 0)


@pytest.mark.parametrize("mscale", [0.707, 1.0])
def test_b76_equal_mscales_leave_cos_and_sin_unscaled(mscale):
    spec = replace(YARN, factor=40.0, mscale=mscale, mscale_all_dim=mscale)
    for position in (0, 1, 7):
        cos_R, sin_R = rotate(spec, position, 8)
        np.testing.assert_allclose(cos_R**2 + sin_R**2, 1, atol=1e-6)


def test_longrope_attention_factor():
    assert attention_factor(LONGROPE) == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert attention_factor(replace(LONGROPE, attention_factor=1.25)) == 1.25
    assert attention_factor(replace(LONGROPE, factor=1.0)) == 1.0


@pytest.mark.parametrize(
    ("position", "length", "factors"),
    [
        (100, 101, LONGROPE.short_factor),
        (4095, 4096, LONGROPE.short_factor),
        (4096, 4097, LONGROPE.long_factor),
        (0, 4097, LONGROPE.long_factor),  # a long prompt is long from its first token on
    ],
)
def test_longrope_switches_by_length(position, length, factors):
    angle = position * plain(1e4, 8) / np.array(factors)
    cos_R, sin_R = rotate(LONGROPE, position, length)
    factor = attention_factor(LONGROPE)
    np.testing.assert_allclose(cos_R, factor * np.cos(angle), atol=1e-3)
    np.testing.assert_allclose(sin_R, factor * np.sin(angle), atol=1e-3)


@pytest.mark.parametrize("length", [1, 4096, 4097, 8192, 100_000])
def test_dynamic_theta_grows_with_the_length(length):
    grown = 2.0 * max(length, 4096) / 4096 - 1
    theta = 1e4 * grown ** (64 / 62)
    cos_R, sin_R = rotate(DYNAMIC, 1, length)
    # Angles of one radian and less: the error is the frequency's own, 1.2e-6 of it at most.
    np.testing.assert_allclose(np.arctan2(sin_R, cos_R), plain(theta, 64), rtol=2e-6)


@pytest.mark.parametrize("spec", [DYNAMIC, LONGROPE, LLAMA3, YARN], ids=lambda s: s.kind)
def test_a_row_depends_on_its_own_position_and_length_only(spec):
    """So that chunking a prompt, or batching it with others, changes no bit."""
    positions_T = jnp.array([3, 5000, 20_000, 0, 4096])
    length_T = jnp.array([5001, 5001, 20_001, 1, 4097])
    together = rotation(spec, positions_T, length_T)
    for t in range(5):
        alone = rotation(spec, positions_T[t : t + 1], length_T[t : t + 1])
        for both, one in zip(together, alone, strict=True):
            np.testing.assert_array_equal(both[t], one[0])


@pytest.mark.parametrize("part", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_b77_partial_rotary(part, dtype):
    head_dim, position = 16, 50
    rotary_dim = int(head_dim * part)
    x = np.random.default_rng(0).normal(size=(1, 3, head_dim))
    x_TNH = jnp.asarray(x, dtype)
    spec = RopeSpec(theta=10_000.0, rotary_dim=rotary_dim)
    turned = apply_rope(x_TNH, *rotation(spec, jnp.array([position]), jnp.array([51])))
    assert turned.dtype == dtype
    np.testing.assert_array_equal(turned[..., rotary_dim:], x_TNH[..., rotary_dim:])
    # Complex numbers: pair (i, i + R/2) times e^(j * position * theta^(-2i/R)).
    exact = np.asarray(x_TNH, np.float64)[..., :rotary_dim]
    half = rotary_dim // 2
    z = exact[..., :half] + 1j * exact[..., half:]
    z = z * np.exp(1j * position * plain(1e4, rotary_dim))
    expected = np.concatenate([z.real, z.imag], -1)
    tolerance = 2e-5 if dtype == jnp.float32 else 2e-2  # bfloat16: half an ulp of values up to 4
    np.testing.assert_allclose(
        np.asarray(turned, np.float64)[..., :rotary_dim], expected, atol=tolerance
    )


def test_b77_adjacent_pairs_are_the_same_rotation_of_reordered_channels():
    """Checkpoints made for neighbouring pairs (2i, 2i + 1) need their rows reordered, no more."""
    x = np.random.default_rng(1).normal(size=(1, 2, 8)).astype(np.float32)
    spec = RopeSpec(theta=10_000.0, rotary_dim=8)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    turned = apply_rope(
        jnp.asarray(x[..., order]), *rotation(spec, jnp.array([50]), jnp.array([51]))
    )
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(50j * plain(1e4, 8))
    np.testing.assert_allclose(turned[..., :4], z.real, atol=2e-5)
    np.testing.assert_allclose(turned[..., 4:], z.imag, atol=2e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"rotary_dim": 7},
        {"rotary_dim": 0},
        {"theta": 0.0},
        {"factor": 0.0},
        {"kind": "dynamic", "max_position": 0},
        {"kind": "yarn"},
        {"kind": "llama3", "original_max_position": 8192, "low_freq_factor": 4.0},
        {"kind": "longrope", "original_max_position": 8192, "short_factor": (1.0,)},
    ],
)
def test_impossible_specs_are_refused(settings):
    with pytest.raises(ValueError, match=r"rope|rotary"):
        RopeSpec(**{"theta": 10_000.0, "rotary_dim": 8, **settings})
