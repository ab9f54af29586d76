"""What a program must know of the chip that it is compiled for; `chips.py` is the table.

Figures are per chip, dense (no structured sparsity), as published, not as measured. A chip may be
several JAX devices (`devices`); what one device has is asked for by the `device_*` properties.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator.

    cores           TensorCores of a TPU, streaming multiprocessors (SMs) of a GPU
    devices         JAX devices per chip: 2 where each TensorCore is its own device
    fp8, int8       None where matmuls of that width are not faster than bfloat16 or do not exist
    link_bytes_per_s   to other chips of the slice or node, all links, both directions
    clock_hz        of the cores: boost clock on GPUs; on TPUs inferred from the peak rate, with two
                    multiply-adds per cell and cycle in the 256 x 256 matrix units
    matmul_dtypes   operand dtypes that the matrix units take without a cast
    device_kinds    what jax calls a device of this chip
    compiler_options   (name, value) that XLA must be given for programs with large weights
    vmem_bytes, smem_bytes   vector and scalar memory of one TensorCore
    shared_memory_bytes      most that one block can ask for, of the SM's `shared_memory_sm_bytes`
    compute_capability       of a GPU, (major, minor)
    """

    name: str
    kind: Literal["tpu", "gpu"]
    cores: int
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None
    int8_ops_per_s: float | None
    hbm_bytes: int
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    clock_hz: float
    matmul_dtypes: tuple[str, ...]
    device_kinds: tuple[str, ...]
    devices: int = 1
    compiler_options: tuple[tuple[str, str], ...] = ()
    vmem_bytes: int | None = None
    smem_bytes: int | None = None
    shared_memory_bytes: int | None = None
    shared_memory_sm_bytes: int | None = None
    l2_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None

    @property
    def device_hbm_bytes(self) -> int:
        return self.hbm_bytes // self.devices

    @property
    def device_hbm_bytes_per_s(self) -> float:
        return self.hbm_bytes_per_s / self.devices

    def hbm_cycles(self, num_bytes: float) -> float:
        """Core cycles in which one device's memory moves `num_bytes`, at the published rate."""
        return num_bytes / self.device_hbm_bytes_per_s * self.clock_hz

    def multiplies(self, dtype: str) -> bool:
        """Whether the matrix units take operands of this dtype (by name) without a cast."""
        return dtype in self.matmul_dtypes
