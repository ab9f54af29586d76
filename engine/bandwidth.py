"""The machine's matmul-read bandwidth: how fast a matrix product can stream its weights."""

import statistics
import time

import jax
import jax.numpy as jnp


def measure_read_bandwidth(dtype: jnp.dtype, rows: int, weight_bytes: int = 1 << 28) -> float:
    """Bytes per second of `x[rows, D] @ w` over one weight far larger than any cache (median of 7).

    This is the ceiling of a decode step: each step reads every weight once.
    """
    D = 4096
    F = weight_bytes // (D * jnp.dtype(dtype).itemsize)
    # Filled on device: distinct values do not matter, distinct memory does.
    w_FD = jnp.full((F, D), 0.5, dtype)
    x_TD = jnp.ones((rows, D), dtype)
    product = jax.jit(lambda x, w: jnp.einsum("TD,FD->TF", x, w))
    product(x_TD, w_FD).block_until_ready()
    times_s = []
    for _ in range(7):
        start = time.perf_counter()
        product(x_TD, w_FD).block_until_ready()
        times_s.append(time.perf_counter() - start)
    return w_FD.nbytes / statistics.median(times_s)
