"""Every family against transformers, from stored tiny checkpoints (tests/parity/make_tiny.py).

The checkpoints hold odd head widths, grouped queries, windows shorter than the prompt, biases far
from zero, norm scales far from one and every rotary scaling. A float32 forward pass of two or three
layers differs from another order of the same sums by some 1e-6 of the largest logit; 1e-4 is
allowed, and a wrong detail costs 1e-2 and more (`test_goldens_are_sensitive_...`).
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoint.load import load_model
from models.config import RopeSpec
from models.families import FAMILIES
from models.params import flatten, unflatten
from tests.models.paged_run import run, run_rotated_to

GOLDENS = Path(__file__).parent.parent / "parity" / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
TOLERANCE = 1e-4
PROMPT = 23
CROSSING_PROMPT = 12


@cache
def load(name):
    config, params = load_model(GOLDENS / name, jnp.float32)
    with np.load(GOLDENS / name / "expected.npz") as arrays:
        return config, params, dict(arrays)


def relative_error(logits, expected):
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def test_every_family_has_a_golden():
    assert {load(name)[0].family for name in NAMES} == {family.name for family in FAMILIES}


def error_of(name, prompt_chunks, *, expected="logits", config=None, params=None, impl="reference"):
    """Relative to the largest logit: the prompt in chunks, then one token at a time.

    Attention is by definition here, for it compiles fast; the families that ask most of it run with
    the default implementation too.
    """
    stored_config, stored_params, golden = load(name)
    tokens, prompt_len = golden["tokens"], sum(prompt_chunks)
    (logits_TV,) = run(
        config or stored_config,
        params or stored_params,
        [tokens],
        [[*prompt_chunks, *[1] * (len(tokens) - prompt_len)]],
        prompt_lens=[prompt_len],
        width=PROMPT,
        attention_impl=impl,
    )
    return relative_error(logits_TV, golden[expected])


@pytest.mark.parametrize("name", NAMES)
def test_prefill_and_decode_match_transformers(name):
    assert error_of(name, [PROMPT]) < TOLERANCE


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "llama_biased_mqa", "mistral"])
def test_default_attention_matches_transformers(name):
    for chunks in ([PROMPT], [5, 1, 11, 6]):
        assert error_of(name, chunks, impl="auto") < TOLERANCE, chunks


@pytest.mark.parametrize("name", NAMES)
def test_chunked_prefill_matches_transformers(name):
    for chunks in ([5, 1, 11, 6], [1] * PROMPT, [16, 7]):
        assert error_of(name, chunks) < TOLERANCE, chunks


@pytest.mark.parametrize("name", NAMES)
def test_a_short_prompt_that_grows_matches_transformers(name):
    """Decoding passes the window and, for dynamic and longrope, the length where frequencies
    change; keys that are already cached keep their rotation, as in the reference's cache."""
    assert error_of(name, [12], expected="crossing_logits") < TOLERANCE


SCALED = [
    "gemma3",
    "llama_dynamic",
    "llama_linear",
    "llama_llama3",
    "llama_yarn",
    "phi3_longrope",
    "qwen2_5_yarn",
]


@pytest.mark.parametrize("name", [*SCALED, "phi3_partial"])
def test_b73_position_20000_matches_transformers(name):
    """One sequence whose first tokens stand at 0..3 and the others at 20,000 and on."""
    config, params, golden = load(name)
    logits_TV = run_rotated_to(
        config,
        params,
        golden["far_tokens"],
        golden["far_positions"],
        int(golden["far_prompt_len"]),
    )
    assert relative_error(logits_TV, golden["far_logits"]) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_goldens_are_sensitive_to_every_vector(name):
    """Without a bias, or with a norm's scale at one, the error is 100 times the tolerance."""
    config, params, _ = load(name)
    leaves = flatten(params)
    for path, leaf in leaves.items():
        is_bias = path.split(".")[-1].startswith("b")
        if path.endswith("bk_KH") and config.learned_positions:
            continue  # without rotation it adds the same to all scores of a query
        if is_bias or path.endswith("norm.scale"):
            neutral = jnp.zeros_like(leaf) if is_bias else jnp.ones_like(leaf)
            changed = unflatten(params, leaves | {path: neutral})
            assert error_of(name, [PROMPT], params=changed) > 100 * TOLERANCE, path


@pytest.mark.parametrize(("name", "axes"), [("qwen3", 1), ("gemma3", 1), ("olmo2", 2)])
def test_b87_qk_norm_counts_in_prefill_and_in_decode(name, axes):
    """Per head (one axis of head width) or over all heads (two axes); prompt of one token or more,
    so that the cached keys and the queries of both passes take part."""
    _, params, _ = load(name)
    leaves = flatten(params)
    norms = [path for path in leaves if path.endswith(("q_norm.scale", "k_norm.scale"))]
    assert len(norms) == 2 * len(params.layers)
    assert {leaves[path].ndim for path in norms} == {axes}
    without = unflatten(params, leaves | {path: jnp.ones_like(leaves[path]) for path in norms})
    for chunks in ([PROMPT], [1] * PROMPT):
        assert error_of(name, chunks) < TOLERANCE
        assert error_of(name, chunks, params=without) > 100 * TOLERANCE


def with_mixer(name, **changes):
    config = load(name)[0]
    layers = [replace(spec, mixer=replace(spec.mixer, **changes)) for spec in config.layers]
    return replace(config, layers=tuple(layers))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"window": 6}),
        ("mistral", {"window": 8}),
        ("gemma2", {"softcap": None}),
        ("gemma2", {"scale": 10**-0.5}),
        ("phi3_partial", {"rope": RopeSpec(10_000.0, 16)}),
        ("qwen2_5_yarn", {"rope": RopeSpec(1_000_000.0, 10)}),
    ],
)
def test_goldens_are_sensitive_to_the_config(name, changes):
    assert error_of(name, [PROMPT], config=with_mixer(name, **changes)) > 100 * TOLERANCE
