"""Facts of the chips that programs are compiled for, one table, every number with its source.

Figures are per chip, dense (no structured sparsity), as published, not as measured. A chip may be
several JAX devices (`devices`); what one device has is asked for by the `device_*` properties.

Sources:
  [cloud]  Google Cloud's TPU pages, one per generation (docs.cloud.google.com/tpu/docs/v5e, ...)
  [jax]    the table of TPU generations in jax (jax/_src/tpu_info.py, 0.12)
  [xla]    XLA's GPU target descriptions (openxla/xla, xla/backends/gpu/target_config/specs)
  [nvidia] NVIDIA's data sheets; where they give the rate with 2:4 sparsity, half of it
  [cuda]   CUDA programming guide, technical specifications per compute capability
  [book]   "How to scale your model" (jax-ml.github.io/scaling-book), hardware tables
  [calc]   arithmetic on the numbers beside it
"""

from dataclasses import dataclass
from typing import Literal

KIB, MIB, GIB = 2**10, 2**20, 2**30


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
    device_kinds    what jax calls a device of this chip [jax] [xla]
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


# [jax] is_matmul_supported. The fp8 formats differ: 3 exponent-bias-11 bits without infinities on
# v5 and v6 (e4m3b11fnuz), the OCP format (e4m3fn) from 7x on.
_V5_DTYPES = ("bfloat16", "float8_e5m2", "float8_e4m3b11fnuz", "int8", "uint8", "int4", "uint4")
_HOPPER_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")

_CHIPS = (
    Chip(
        name="v4",
        kind="tpu",
        cores=2,  # [cloud]
        bf16_flops_per_s=275e12,  # [cloud]
        fp8_flops_per_s=None,  # [jax]
        int8_ops_per_s=275e12,  # [cloud]
        hbm_bytes=32 * GIB,  # [cloud]
        hbm_bytes_per_s=1200e9,  # [cloud]
        link_bytes_per_s=540e9,  # [book] 6 links of 90e9 both ways
        clock_hz=1.05e9,  # [calc] 275e12 / (2 cores x 4 MXUs x 128 x 128 x 2)
        matmul_dtypes=("bfloat16",),  # [jax]; int8 only as the right operand of a bfloat16 one
        device_kinds=("TPU v4",),
        vmem_bytes=16 * MIB,  # [jax]
        smem_bytes=1 * MIB,  # [jax]
    ),
    Chip(
        name="v5e",
        kind="tpu",
        cores=1,  # [cloud]
        bf16_flops_per_s=197e12,  # [cloud]
        fp8_flops_per_s=None,  # [jax]
        int8_ops_per_s=394e12,  # [jax]; [cloud] 393
        hbm_bytes=16 * GIB,  # [cloud]; [jax] 17.2e9
        hbm_bytes_per_s=819e9,  # [cloud]
        link_bytes_per_s=400e9,  # [cloud]
        clock_hz=1.5e9,  # [calc] 197e12 / (4 MXUs x 128 x 128 x 2)
        matmul_dtypes=_V5_DTYPES,
        device_kinds=("TPU v5 lite", "TPU v5e"),
        vmem_bytes=128 * MIB,  # [jax]
        smem_bytes=1 * MIB,  # [jax]
    ),
    Chip(
        name="v5p",
        kind="tpu",
        cores=2,  # [cloud]; one device
        bf16_flops_per_s=459e12,  # [cloud]
        fp8_flops_per_s=459e12,  # [cloud]: accepted, no faster than bfloat16
        int8_ops_per_s=918e12,  # [jax]
        hbm_bytes=95 * GIB,  # [cloud]
        hbm_bytes_per_s=2765e9,  # [cloud]; [jax] has 2460e9
        link_bytes_per_s=1200e9,  # [cloud]
        clock_hz=1.75e9,  # [calc] 459e12 / (2 cores x 4 MXUs x 128 x 128 x 2)
        matmul_dtypes=_V5_DTYPES,
        device_kinds=("TPU v5", "TPU v5p"),
        vmem_bytes=64 * MIB,  # [jax]
        smem_bytes=1 * MIB,  # [jax]
    ),
    Chip(
        name="v6e",
        kind="tpu",
        cores=1,  # [cloud]
        bf16_flops_per_s=918e12,  # [cloud]
        fp8_flops_per_s=918e12,  # [cloud]: accepted, no faster than bfloat16
        int8_ops_per_s=1836e12,  # [cloud]
        hbm_bytes=32 * GIB,  # [cloud]
        hbm_bytes_per_s=1638e9,  # [cloud]
        link_bytes_per_s=800e9,  # [cloud]
        clock_hz=1.75e9,  # [calc] 918e12 / (2 MXUs x 256 x 256 x 4), see clock_hz above
        matmul_dtypes=_V5_DTYPES,
        device_kinds=("TPU v6 lite", "TPU v6e"),
        vmem_bytes=128 * MIB,  # [jax]
        smem_bytes=1 * MIB,  # [jax]
    ),
    Chip(
        name="tpu7x",
        kind="tpu",
        cores=2,  # [cloud]
        devices=2,  # [cloud] each TensorCore is a device of its own
        bf16_flops_per_s=2307e12,  # [cloud]
        fp8_flops_per_s=4614e12,  # [cloud]
        int8_ops_per_s=None,  # [jax] no int8 matmul
        hbm_bytes=192 * GIB,  # [cloud]
        hbm_bytes_per_s=7380e9,  # [cloud]
        link_bytes_per_s=1200e9,  # [cloud]
        clock_hz=2.2e9,  # [calc] 2307e12 / (2 cores x 2 MXUs x 256 x 256 x 4)
        matmul_dtypes=("bfloat16", "float8_e4m3fn", "float8_e5m2"),  # [jax]
        device_kinds=("TPU7x",),
        # Else every program begins by copying all weights of matmuls into another tiling.
        compiler_options=(("xla_tpu_control_large_2nd_minor_layout_for_x16", "false"),),
        vmem_bytes=64 * MIB,  # [jax]
        smem_bytes=1 * MIB,  # [jax]
    ),
    Chip(
        name="a100",  # SXM4, 80 GB
        kind="gpu",
        cores=108,  # [xla]
        bf16_flops_per_s=312e12,  # [nvidia]
        fp8_flops_per_s=None,  # [nvidia]
        int8_ops_per_s=624e12,  # [nvidia]
        hbm_bytes=85_100_068_864,  # [xla]
        hbm_bytes_per_s=2039e9,  # [xla]
        link_bytes_per_s=600e9,  # [nvidia] NVLink 3
        clock_hz=1.41e9,  # [xla]
        matmul_dtypes=("bfloat16", "float16", "int8", "int4"),  # [nvidia]
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        shared_memory_bytes=166_912,  # [xla]
        shared_memory_sm_bytes=167_936,  # [xla]
        l2_bytes=40 * MIB,  # [xla]
        compute_capability=(8, 0),  # [xla]
    ),
    Chip(
        name="l4",
        kind="gpu",
        cores=58,  # [calc] 7,424 CUDA cores [nvidia] / 128 per SM
        bf16_flops_per_s=121e12,  # [nvidia] 242e12 with sparsity
        fp8_flops_per_s=242e12,  # [nvidia] 485e12 with sparsity
        int8_ops_per_s=242e12,  # [nvidia] 485e12 with sparsity
        hbm_bytes=24_000_000_000,  # [nvidia] 24 GB (GDDR6)
        hbm_bytes_per_s=300e9,  # [nvidia]
        link_bytes_per_s=64e9,  # [nvidia] PCIe 4 x16
        clock_hz=2.04e9,  # [nvidia]
        matmul_dtypes=("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int4"),
        device_kinds=("NVIDIA L4",),
        shared_memory_bytes=99 * KIB,  # [cuda] 8.9
        shared_memory_sm_bytes=100 * KIB,  # [cuda] 8.9
        l2_bytes=48 * MIB,  # [nvidia]
        compute_capability=(8, 9),  # [cuda]
    ),
    Chip(
        name="h100",  # SXM5, 80 GB
        kind="gpu",
        cores=132,  # [xla]
        bf16_flops_per_s=989e12,  # [nvidia]
        fp8_flops_per_s=1979e12,  # [nvidia]
        int8_ops_per_s=1979e12,  # [nvidia]
        hbm_bytes=84_942_979_072,  # [xla]
        hbm_bytes_per_s=3352e9,  # [xla]
        link_bytes_per_s=900e9,  # [nvidia] NVLink 4
        clock_hz=1.98e9,  # [xla]
        matmul_dtypes=_HOPPER_DTYPES,  # [nvidia]
        device_kinds=("NVIDIA H100 80GB HBM3",),
        shared_memory_bytes=232_448,  # [xla]
        shared_memory_sm_bytes=233_472,  # [xla]
        l2_bytes=50 * MIB,  # [xla]
        compute_capability=(9, 0),  # [xla]
    ),
    Chip(
        name="h200",  # SXM, 141 GB
        kind="gpu",
        cores=132,  # [xla]
        bf16_flops_per_s=989e12,  # [nvidia]
        fp8_flops_per_s=1979e12,  # [nvidia]
        int8_ops_per_s=1979e12,  # [nvidia]
        hbm_bytes=151_397_597_184,  # [xla]
        hbm_bytes_per_s=4800e9,  # [xla]
        link_bytes_per_s=900e9,  # [nvidia] NVLink 4
        clock_hz=1.98e9,  # [xla]
        matmul_dtypes=_HOPPER_DTYPES,  # [nvidia]
        device_kinds=("NVIDIA H200",),
        shared_memory_bytes=232_448,  # [xla]
        shared_memory_sm_bytes=233_472,  # [xla]
        l2_bytes=50 * MIB,  # [xla]
        compute_capability=(9, 0),  # [xla]
    ),
    Chip(
        name="b200",
        kind="gpu",
        cores=148,  # [xla]
        bf16_flops_per_s=2225e12,  # [calc] from [xla]: 148 SMs x 4 x 1024 x 2 x 1.835e9
        fp8_flops_per_s=4450e12,  # [calc] from [xla]: twice that
        int8_ops_per_s=4450e12,  # [calc] from [xla]
        hbm_bytes=191_514_411_008,  # [xla]
        hbm_bytes_per_s=7672e9,  # [xla]
        link_bytes_per_s=1800e9,  # [nvidia] NVLink 5
        clock_hz=1.965e9,  # [xla]
        matmul_dtypes=(*_HOPPER_DTYPES, "float4_e2m1fn"),  # [nvidia]
        device_kinds=("NVIDIA B200",),
        shared_memory_bytes=232_448,  # [xla]
        shared_memory_sm_bytes=233_472,  # [xla]
        l2_bytes=132_644_864,  # [xla]
        compute_capability=(10, 0),  # [xla]
    ),
)

CHIPS: dict[str, Chip] = {c.name: c for c in _CHIPS}


def chip_of_device(device_kind: str) -> Chip | None:
    """The chip that jax calls so; None for any other, the host's CPU among them."""
    return next((c for c in _CHIPS if device_kind in c.device_kinds), None)


def chip(name: str) -> Chip:
    """The chip of this name; ValueError lists the known ones."""
    if name not in CHIPS:
        raise ValueError(f"there is no chip {name!r}; known: {', '.join(CHIPS)}")
    return CHIPS[name]
