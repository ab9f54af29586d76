"""Named attention problems of real models, shared by tests and benchmarks, and their inputs.

`make_inputs` poisons everything that the contract says must not matter: unused pages (the trash
page included), positions past the end of a sequence, positions that no query's window reaches,
query rows that no slot owns, and page table entries outside of the used range.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.layout import pages_shape

POISON = (np.nan, np.inf, -np.inf, 1e30)
PADDING_ROWS = 3


@dataclass(frozen=True)
class Case:
    """One call: slot s brings q_lens[s] tokens, and kv_lens[s] keys with these included."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: str = "float32"

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


class Inputs(NamedTuple):
    """The arguments of `ragged_paged_attention` for one case."""

    q_TNH: jax.Array
    kv_pages: jax.Array
    page_table_SM: jax.Array
    q_start_S: jax.Array
    q_len_S: jax.Array
    kv_len_S: jax.Array
    sinks_N: jax.Array | None


def decode(name: str, heads: tuple[int, int, int], kv_lens: tuple[int, ...], **rest) -> Case:
    """Every slot that has keys brings one token."""
    return Case(name, *heads, 16, tuple(min(1, n) for n in kv_lens), kv_lens, **rest)


SMOLLM2 = (9, 3, 64)
GEMMA2 = {"window": 4096, "softcap": 50.0}
# Head counts, head widths, windows and caps as in each model's published config.
CASES = (
    decode("smollm2_135m_decode", SMOLLM2, (72, 1, 16, 17, 250, 33, 0, 300)),
    Case("smollm2_135m_prefill", *SMOLLM2, 16, (130, 1, 0, 57), (130, 200, 0, 90)),
    Case("smollm2_135m_verify", *SMOLLM2, 16, (5, 5, 2, 1), (37, 5, 64, 100)),
    decode("llama_3_1_8b_decode", (32, 8, 128), (100, 33, 1)),
    Case("llama_3_1_8b_chunk", 32, 8, 128, 32, (40, 1), (100, 65)),
    decode("gemma_2_2b_decode", (8, 4, 256), (70, 20), **GEMMA2),
    Case("gemma_3_270m_local_prefill", 4, 1, 256, 16, (70, 6), (600, 6), window=512),
    decode("gemma_3_270m_local_decode", (4, 1, 256), (600, 512, 5), window=512),
    Case("gpt_2_prefill", 12, 12, 64, 16, (20, 3), (20, 30)),
    decode("phi_3_mini_decode", (32, 32, 96), (40, 20), window=2047),
    decode("qwen_2_5_0_5b_decode", (14, 2, 64), (129, 64, 2)),
    Case("qwen_3_0_6b_contiguous", 16, 8, 128, 256, (9, 1), (256, 255)),
    decode("gpt_oss_20b_decode", (64, 8, 64), (150, 17), window=128, sinks=True),
    Case("h2o_danube_1_8b_prefill", 32, 8, 80, 16, (18, 1), (40, 70), window=4096),
)


def _poison(shape: tuple[int, ...]) -> np.ndarray:
    return np.resize(np.array(POISON, np.float32), shape)


def make_inputs(case: Case, seed: int = 0, dtype: str | None = None) -> Inputs:
    """Random inputs of a case; the pool has one unused page beside the trash page."""
    rng = np.random.default_rng(seed)
    size, slots = case.page_size, len(case.q_lens)
    pages_S = [-(-length // size) for length in case.kv_lens]
    num_pages = sum(pages_S) + 2
    kv_pages = _poison(pages_shape(num_pages, size, case.num_kv_heads, case.head_dim))
    # Columns past the used ones point anywhere, also out of the pool.
    table_SM = rng.integers(-2, num_pages + 2, (slots, max(1, *pages_S) + 2)).astype(np.int32)
    free = rng.permutation(np.arange(1, num_pages))
    for s, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        table_SM[s, : pages_S[s]], free = free[: pages_S[s]], free[pages_S[s] :]
        first = 0 if case.window is None else max(0, kv_len - q_len - case.window + 1)
        x_X = np.arange(first, kv_len)
        kv_pages[table_SM[s, x_X // size], :, :, x_X % size] = rng.standard_normal(
            (x_X.size, 2, case.num_kv_heads, case.head_dim), np.float32
        )
    rows = sum(case.q_lens)
    q_TNH = _poison((rows + PADDING_ROWS, case.num_heads, case.head_dim))
    q_TNH[:rows] = rng.standard_normal((rows, case.num_heads, case.head_dim), np.float32)
    q_start_S = np.cumsum((0, *case.q_lens[:-1]))
    dtype = dtype or case.dtype
    return Inputs(
        jnp.asarray(q_TNH, dtype),
        jnp.asarray(kv_pages, dtype),
        jnp.asarray(table_SM),
        jnp.asarray(q_start_S, jnp.int32),
        jnp.asarray(case.q_lens, jnp.int32),
        jnp.asarray(case.kv_lens, jnp.int32),
        jnp.asarray(rng.standard_normal(case.num_heads), jnp.float32) if case.sinks else None,
    )
