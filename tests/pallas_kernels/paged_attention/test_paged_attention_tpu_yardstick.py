"""The TPU kernel that comes with jax, on the named cases: what it takes, and how near it comes."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

from pallas_kernels.chips import chip
from pallas_kernels.paged_attention import tpu
from pallas_kernels.paged_attention.cases import CASES, make_inputs
from pallas_kernels.paged_attention.spec import check, tolerance
from tests.pallas_kernels.paged_attention.attention_oracle import oracle
from tests.pallas_kernels.paged_attention.tpu_runs import packed

WIDEST = 4  # pages that it takes at once


def expressible(case):
    """It has no argument for more than one new token a slot, for a window or for sinks; its heads
    are compiled if their width is a multiple of 128 (tests/aot)."""
    window_matters = case.window is not None and case.window < max(case.kv_lens)
    return (
        max(case.q_lens) == 1 and not case.sinks and not window_matters and case.head_dim % 128 == 0
    )


def spec_of(case):
    *arrays, sinks_N = make_inputs(case, dtype="bfloat16")
    arrays[1] = packed(arrays[1])
    return check(
        *arrays,
        scale=case.scale,
        max_q_len=max(case.q_lens),
        window=case.window,
        softcap=case.softcap,
        sinks_N=sinks_N,
    )


def test_ours_takes_strictly_more():
    ours = {case.name for case in CASES if tpu.supports(spec_of(case), chip("v6e")) is None}
    theirs = {case.name for case in CASES if expressible(case)}
    assert theirs == {"llama_3_1_8b_decode", "gemma_2_2b_decode"}
    assert theirs < ours == {case.name for case in CASES}


@pytest.mark.parametrize("case", [*filter(expressible, CASES)], ids=lambda case: case.name)
def test_theirs_is_right_within_what_bfloat16_products_allow(case):
    """It rounds float32 keys and values to bfloat16, and must not meet NaN beside the used pages:
    ours is held to 1e-5 on these inputs with NaN in them."""
    inputs = make_inputs(case)
    kv_pages = jnp.where(jnp.abs(inputs.kv_pages) < 1e3, inputs.kv_pages, 0.0)
    k_KPCH, v_KPCH = kv_pages.transpose(1, 2, 0, 3, 4)
    table_SM = np.clip(inputs.page_table_SM, 0, kv_pages.shape[0] - 1)
    table_SM = jnp.pad(jnp.asarray(table_SM), ((0, 0), (0, -table_SM.shape[1] % WIDEST)))
    q_SNH = inputs.q_TNH[: len(case.q_lens)] * case.scale
    with pltpu.force_tpu_interpret_mode():
        out_SNH = paged_attention(
            q_SNH,
            k_KPCH,
            v_KPCH,
            inputs.kv_len_S,
            table_SM,
            attn_logits_soft_cap=case.softcap,
            pages_per_compute_block=WIDEST,
        )
    expected_SNH = oracle(inputs, scale=case.scale, softcap=case.softcap)[: len(case.q_lens)]
    error = np.abs(np.asarray(out_SNH, np.float64) - expected_SNH).max()
    assert error <= tolerance(spec_of(case), max(case.kv_lens))[0]
