"""Weights on a CPU: in one region, aligned, taken over by JAX without a copy."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoint.host_memory import ALIGNMENT_BYTES, HostRegion


def test_arrays_keep_their_values_side_by_side():
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(s).astype(d) for s, d in (((3, 5), "f4"), ((), "f4"), ((7,), "f8"))
    ]
    arrays.append(np.asarray(jnp.ones((2, 3), jnp.bfloat16)))
    arrays.append(np.zeros((0, 4), np.float32))
    region = HostRegion(sum(a.nbytes for a in arrays), len(arrays))
    placed = [region.put(a) for a in arrays]
    for array, copy in zip(arrays, placed, strict=True):
        assert copy.dtype == array.dtype
        np.testing.assert_array_equal(copy, array)
        assert not copy.size or copy.ctypes.data % ALIGNMENT_BYTES == 0


def test_more_than_was_asked_for_is_refused():
    region = HostRegion(8, 0)
    with pytest.raises(ValueError, match="reshape"):
        region.put(np.ones(20, np.float64))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_jax_copies_nothing_and_keeps_the_region(dtype):
    region = HostRegion(1 << 20, 1)
    memory = weakref.ref(region._bytes)
    host = region.put(np.full((64, 32), 3, dtype))
    array = jax.device_put(host, None).block_until_ready()
    assert array.unsafe_buffer_pointer() == host.ctypes.data
    del host, region
    gc.collect()
    assert memory() is not None
    assert float(array.sum()) == 3 * 64 * 32
