"""Memory for the weights of a model that runs on the host's CPU: one region for all of them.

A decode step reads every weight once, and with pages of 4 KiB the processor spends a tenth of that
on address translation. NumPy asks Linux for huge pages behind large arrays (4 MiB and more), which
single weights often are not. JAX takes aligned host arrays over without a copy, and each keeps the
region alive.
"""

import numpy as np

ALIGNMENT_BYTES = 64  # what XLA's CPU client asks of a buffer it takes over


class HostRegion:
    """Hands out its memory front to back, once."""

    def __init__(self, size_bytes: int, num_arrays: int):
        """Room for `size_bytes` in up to `num_arrays` arrays; touched only when it is filled."""
        self._bytes = np.empty(size_bytes + (num_arrays + 1) * ALIGNMENT_BYTES, np.uint8)
        self._used = -self._bytes.ctypes.data % ALIGNMENT_BYTES

    def put(self, array: np.ndarray) -> np.ndarray:
        """A copy of `array` in the region."""
        end = self._used + array.nbytes
        copy = self._bytes[self._used : end].view(array.dtype).reshape(array.shape)
        copy[...] = array
        self._used = end + -(self._bytes.ctypes.data + end) % ALIGNMENT_BYTES
        return copy
