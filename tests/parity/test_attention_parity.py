"""The attention kernels' reference against transformers' own eager attention."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    eager_mask,
    sliding_window_causal_mask_function,
)
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.paged_attention.cases import Case, make_inputs
from tests.pallas_kernels.paged_attention.attention_oracle import tolerance

# A chunk of a prompt, a verification, a decode row and a whole prompt, beside an idle slot.
LENGTHS = ((9, 5, 1, 0, 7), (40, 37, 33, 20, 7))
CASES = {
    "llama": (modeling_llama, Case("causal", 6, 2, 16, 4, *LENGTHS)),
    "gemma2": (modeling_gemma2, Case("capped", 4, 4, 8, 4, *LENGTHS, window=12, softcap=1.5)),
    "gpt_oss": (modeling_gpt_oss, Case("sinks", 6, 2, 8, 4, *LENGTHS, window=9, sinks=True)),
}


def tensor(array):
    return torch.from_numpy(np.array(array, np.float32))


def eager(modeling, case, inputs):
    """o_TNH, slot by slot over dense keys and values; rows that no slot owns are 0."""
    kv_pages, table_SM = np.asarray(inputs.kv_pages), np.asarray(inputs.page_table_SM)
    mask_function = causal_mask_function
    if case.window is not None:
        mask_function = sliding_window_causal_mask_function(case.window)
    module = SimpleNamespace(
        num_key_value_groups=case.num_heads // case.num_kv_heads,
        head_dim=case.head_dim,
        training=False,
        sinks=None if inputs.sinks_N is None else tensor(inputs.sinks_N),
    )
    out_TNH, row = np.zeros(inputs.q_TNH.shape, np.float32), 0
    for s, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        if q_len == 0:
            continue
        x_L = np.arange(kv_len)
        kv_L2KH = kv_pages[table_SM[s, x_L // case.page_size], :, :, x_L % case.page_size]
        # Positions that no query sees are poisoned, and a mask that is added keeps NaN.
        kv_L2KH = np.where(np.abs(kv_L2KH) < 1e3, kv_L2KH, 0)
        k_1KLH, v_1KLH = kv_L2KH.transpose(1, 2, 0, 3)[:, None]
        q_1NQH = np.asarray(inputs.q_TNH)[row : row + q_len].transpose(1, 0, 2)[None]
        out_1QNH, _ = modeling.eager_attention_forward(
            module,
            *(tensor(a) for a in (q_1NQH, k_1KLH, v_1KLH)),
            eager_mask(1, q_len, kv_len, q_offset=kv_len - q_len, mask_function=mask_function),
            scaling=case.scale,
            softcap=case.softcap,
        )
        out_TNH[row : row + q_len] = out_1QNH[0].numpy()
        row += q_len
    return out_TNH


@pytest.mark.parametrize("name", CASES)
def test_as_eager_attention(name):
    """Both sides are float32 and may err by the tolerance each."""
    modeling, case = CASES[name]
    inputs = make_inputs(case)
    *arrays, sinks_N = inputs
    got_TNH = ragged_paged_attention(
        *arrays,
        scale=case.scale,
        max_q_len=max(case.q_lens),
        window=case.window,
        softcap=case.softcap,
        sinks_N=sinks_N,
        impl="reference",
    )
    expected_TNH = eager(modeling, case, inputs)
    error = np.abs(np.asarray(got_TNH) - expected_TNH) / tolerance(inputs, expected_TNH)
    assert error.max() <= 2
