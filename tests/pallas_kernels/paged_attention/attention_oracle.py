"""Ragged paged attention in numpy float64, row by row, reading the pages one position at a time."""

import numpy as np

from pallas_kernels.paged_attention import spec as contract


def oracle(inputs, *, scale, window=None, softcap=None):
    """o_TNH in float64; rows that no slot owns are 0."""
    q_TNH, pages = (np.asarray(a, np.float64) for a in (inputs.q_TNH, inputs.kv_pages))
    table_SM, *slots = (np.asarray(a) for a in inputs[2:6])
    num_kv_heads, page_size = pages.shape[2:4]
    group = q_TNH.shape[1] // num_kv_heads
    out_TNH = np.zeros_like(q_TNH)
    for table_M, begin, q_len, kv_len in zip(table_SM, *slots, strict=True):
        for i in range(q_len):
            p = kv_len - q_len + i
            first = 0 if window is None else max(0, p - window + 1)
            places = [(table_M[j // page_size], j % page_size) for j in range(first, p + 1)]
            k_LKH = np.stack([pages[page, 0, :, c] for page, c in places])
            v_LKH = np.stack([pages[page, 1, :, c] for page, c in places])
            for n in range(q_TNH.shape[1]):
                score_L = scale * (k_LKH[:, n // group] @ q_TNH[begin + i, n])
                if softcap is not None:
                    score_L = softcap * np.tanh(score_L / softcap)
                logits = score_L
                if inputs.sinks_N is not None:
                    logits = np.append(score_L, float(inputs.sinks_N[n]))
                weight_L = np.exp(logits - logits.max())
                weight_L = (weight_L / weight_L.sum())[: len(score_L)]
                out_TNH[begin + i, n] = weight_L @ v_LKH[:, n // group]
    return out_TNH


def tolerance(inputs, expected):
    """Largest error allowed per element.

    Float32 arithmetic: a score is a sum of H products and the output one of L, each rounding by
    unit roundoff u = 2^-24 with random signs, carried to the output by values of at most 4 (a
    normal draw): 4 u (sqrt(H) + sqrt(L)). Then one rounding to the output's dtype, half a unit in
    the last place: 2^-24 of the value, or 2^-8 with bfloat16's 8 significant bits.
    """
    head_dim, length = inputs.q_TNH.shape[2], int(np.max(inputs.kv_len_S))
    float32 = 4 * 2.0**-24 * (np.sqrt(head_dim) + np.sqrt(length))
    significant_bits = {"float32": 24, "bfloat16": 8}[inputs.q_TNH.dtype.name]
    return float32 + np.abs(expected) * 2.0**-significant_bits


def check(got, inputs, expected):
    """Assert that `got` is `expected` within the tolerance, and finite."""
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    excess = np.abs(got - expected) / tolerance(inputs, expected)
    assert excess.max() <= 1, f"error is {excess.max():.2f} tolerances"


def excess(out_TNH, case, inputs, spec):
    """Largest error in units of the tolerance; infinite if any number is not finite."""
    expected = oracle(inputs, scale=case.scale, window=case.window, softcap=case.softcap)
    absolute, relative = contract.tolerance(spec, int(np.max(inputs.kv_len_S)))
    error = np.abs(out_TNH - expected) / (absolute + relative * np.abs(expected))
    return np.where(np.isfinite(error), error, np.inf).max()
