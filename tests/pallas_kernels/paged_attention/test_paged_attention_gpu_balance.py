"""How evenly the GPU kernels' programs share the keys, whatever the lengths and their order."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import chip
from pallas_kernels.paged_attention import gpu_mosaic_sizes, gpu_triton_sizes
from pallas_kernels.paged_attention.gpu_plan import Unit, plan_units
from tests.pallas_kernels.paged_attention.test_paged_attention_gpu_border import gpu_spec

K = 8  # KV heads
SHUFFLED = np.random.default_rng(0).permutation(np.geomspace(128, 32_768, 64).astype(int))
LENGTHS = {
    "uniform": (4096,) * 64,
    "geometric": tuple(SHUFFLED),
    "one_of_128k": (1024,) * 40 + (131_072,) + (1024,) * 23,
    "one_of_32k_among_256": (512,) * 255 + (32_768,),
    "few": (16_384,) * 8,
    "alone": (16_384,),
}


def loads(lengths, sizes, num_programs):
    """Key blocks of each program: items (unit, KV head) are taken in turns."""
    kv_len_S = jnp.asarray(lengths, jnp.int32)
    slots = len(lengths)
    one_S, every_S = jnp.ones(slots, jnp.int32), jnp.ones(slots, bool)
    units_W8, count_1, *_ = plan_units(
        *(jnp.arange(slots), one_S, kv_len_S, every_S, every_S),
        *(sizes, None, slots * sizes.parts),
    )
    units = np.asarray(units_W8)[: int(count_1[0])]
    blocks = np.repeat(units[:, Unit.END] - units[:, Unit.BEGIN], K)
    assert blocks.sum() == K * sum(-(-length // sizes.keys) for length in lengths)
    return np.bincount(np.arange(blocks.size) % num_programs, blocks, num_programs)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("backend", ["gpu_triton", "gpu_mosaic"])
def test_no_program_has_much_more_than_its_share(lengths, backend):
    h200, slots = chip("h200"), len(lengths)
    spec = gpu_spec(heads=(64, K, 128), slots=slots, columns=131_072 // 16)
    if backend == "gpu_triton":
        (sizes,) = gpu_triton_sizes.default_sizes(spec, h200)
        programs = K * sizes.programs
    else:
        sizes = gpu_mosaic_sizes.default_sizes(spec, h200)
        programs = sizes.streams * sizes.programs
    assert programs == 2 * h200.cores
    each = loads(lengths, sizes, programs)
    assert each.max() <= 1.08 * each.mean()
