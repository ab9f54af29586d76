"""New keys and values into the page pool, in place: one function for every chip."""

import jax

from pallas_kernels.cache_update import tpu
from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention.layout import page_rows, write_pages


def update_cache(
    kv_pages: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    *,
    chip: Chip | None = None,
) -> jax.Array:
    """Put the keys and values of T tokens at (page, offset); in place when the pool is donated.

    Padding tokens come with page 0, the trash page, whose content is unspecified. A page or offset
    outside of the pool is dropped. Two tokens must not share a place, and tokens that go to the
    same page must be adjacent. `chip` is what the call is compiled for; None: the host's CPU.
    """
    if tpu.supports(kv_pages.shape, chip) is None:
        new_TRL = page_rows(kv_pages, k_TKH, v_TKH, page_T, offset_T)
        return tpu.write(kv_pages, new_TRL, page_T, offset_T)
    return write_pages(kv_pages, k_TKH, v_TKH, page_T, offset_T)
