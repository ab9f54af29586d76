"""New keys and values put into the page pool in place, on a TPU.

A row of a page is one sublane of many registers, so a token cannot be copied to its place: a slab
of 16 positions of a page, all heads, is brought to vector memory, changed and written back.
Adjacent tokens that go to the same slab are one run. Several slabs are in flight.

new_TRL      what token t puts into each row R of its page, in the pool's dtype
kv_PpRCL     page pool, aliased to the output

Invariant: each slab belongs to one run, since a page that is written has one owner, whose tokens
are adjacent. Tokens for the trash page or out of the pool are dropped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention.layout import TRASH_PAGE

SLAB = 16
BUFFERS = 8


class Runs(NamedTuple):
    """Per run: page, first position of its slab, first token, that one's place in it, tokens."""

    page: jax.Array
    position: jax.Array
    token: jax.Array
    begin: jax.Array
    count: jax.Array


def supports(shape: tuple[int, ...], chip: Chip | None) -> str | None:
    """None, or why pages of this shape cannot be written by the kernel."""
    if chip is None or chip.kind != "tpu":
        return f"needs a TPU, the call is for {chip.name if chip else 'the host CPU'}"
    if shape[3] % SLAB:
        return f"page size {shape[3]}: must be a multiple of {SLAB}"
    return None


def find_runs(
    page_T: jax.Array, offset_T: jax.Array, shape: tuple[int, ...]
) -> tuple[Runs, jax.Array]:
    """Runs of adjacent tokens of one slab, and how many there are; the rest have no tokens."""
    num_pages, _, _, page_size, _ = shape
    real_T = (page_T > TRASH_PAGE) & (page_T < num_pages) & (offset_T >= 0) & (offset_T < page_size)
    slab_T = jnp.where(real_T, page_T * (page_size // SLAB) + offset_T // SLAB, -1)
    begins_T = real_T & (slab_T != jnp.pad(slab_T, (1, 0), constant_values=-1)[:-1])
    run_T = jnp.where(real_T, jnp.cumsum(begins_T), 0)
    i_I = jnp.arange(1, page_T.shape[0] + 1, dtype=jnp.int32)
    mine_IT = run_T == i_I[:, None]
    token_I = jnp.argmax(mine_IT, axis=1).astype(jnp.int32)
    offset_I = offset_T.at[token_I].get(mode="clip")
    runs = Runs(
        page=page_T.at[token_I].get(mode="clip"),
        position=offset_I // SLAB * SLAB,
        token=token_I,
        begin=offset_I % SLAB,
        count=jnp.sum(mine_IT, axis=1, dtype=jnp.int32),
    )
    return runs, jnp.sum(begins_T, dtype=jnp.int32)


def kernel(num_runs, *refs):
    runs, (new_hbm, _, kv_hbm, *scratch) = Runs(*refs[:5]), refs[5:]
    slabs, rows, in_sem, out_sem = scratch
    num_runs = num_runs[0]
    _, parts, num_rows, _, lanes = slabs.shape

    def home(i):
        position = pl.multiple_of(runs.position[i], SLAB)
        return kv_hbm.at[runs.page[i], :, :, pl.ds(position, SLAB)]

    def slab_in(i):
        buffer = i & (BUFFERS - 1)
        return pltpu.make_async_copy(home(i), slabs.at[buffer], in_sem.at[buffer])

    def slab_out(i):
        buffer = i & (BUFFERS - 1)
        return pltpu.make_async_copy(slabs.at[buffer], home(i), out_sem.at[buffer])

    def each_row(i, act):
        buffer = i & (BUFFERS - 1)

        def one(j, _):
            row = new_hbm.at[runs.token[i] + j]
            act(pltpu.make_async_copy(row, rows.at[buffer, j], in_sem.at[buffer]))

        lax.fori_loop(0, runs.count[i], one, None)

    def fetch(i):
        @pl.when(i < num_runs)
        def _():
            pl.when(i >= BUFFERS)(lambda: slab_out(i - BUFFERS).wait())
            slab_in(i).start()
            each_row(i, lambda copy: copy.start())

    def put(i, j):
        """Row j of run i into its place."""
        buffer = i & (BUFFERS - 1)
        place = lax.broadcasted_iota(jnp.int32, (SLAB, lanes), 0) == runs.begin[i] + j
        for part in range(parts):
            for r in range(num_rows):
                new = rows[buffer, j, part * num_rows + r : part * num_rows + r + 1]
                old = slabs[buffer, part, r].astype(jnp.float32)
                both = jnp.where(place, new.astype(jnp.float32), old)
                slabs[buffer, part, r] = both.astype(slabs.dtype)

    def update(i, _):
        fetch(i + BUFFERS // 2)
        slab_in(i).wait()
        each_row(i, lambda copy: copy.wait())
        lax.fori_loop(0, runs.count[i], lambda j, _: put(i, j), None)
        slab_out(i).start()

    lax.fori_loop(0, BUFFERS // 2, lambda i, _: fetch(i), None)
    lax.fori_loop(0, num_runs, update, None)
    # Writes whose buffer no later run has taken are still to be waited for.
    first = jnp.maximum(num_runs - BUFFERS, 0)
    lax.fori_loop(first, num_runs, lambda i, _: slab_out(i).wait(), None)


def write(
    kv_pages: jax.Array,
    new_TRL: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """The pool with row R of page page_T[t] at offset_T[t] set to new_TRL[t]."""
    _, parts, num_rows, _, lanes = kv_pages.shape
    runs, num_runs = find_runs(page_T, offset_T, kv_pages.shape)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(runs),
            grid=(1,),
            in_specs=[hbm, hbm],
            out_specs=hbm,
            scratch_shapes=[
                pltpu.VMEM((BUFFERS, parts, num_rows, SLAB, lanes), kv_pages.dtype),
                pltpu.VMEM((BUFFERS, SLAB, parts * num_rows, lanes), kv_pages.dtype),
                pltpu.SemaphoreType.DMA((BUFFERS,)),
                pltpu.SemaphoreType.DMA((BUFFERS,)),
            ],
        ),
        input_output_aliases={len(runs) + 2: 0},
        interpret=interpret,
        name="cache_update",
    )(num_runs[None], *runs, new_TRL, kv_pages)
