"""How fast this machine moves bytes: the weights of a matrix product, and a plain copy."""

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


def measure_copy_bandwidth(num_bytes: int = 1 << 31) -> float:
    """Bytes per second, read and written, of a copy of an array of this size (median of 7)."""
    x = jnp.zeros(num_bytes // 4, jnp.uint32)
    y = jnp.zeros_like(x)
    # The second array, which nobody reads, gives its place to the result.
    copy = jax.jit(lambda x, y: x ^ 1, donate_argnums=1, keep_unused=True)
    calls, times_s = 40, []
    for _ in range(8):  # the first one compiles
        start = time.perf_counter()
        for _ in range(calls):
            y = copy(x, y)
        y.block_until_ready()
        times_s.append((time.perf_counter() - start) / calls)
    return 2 * x.nbytes / statistics.median(times_s[1:])
