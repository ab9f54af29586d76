"""Facts of the chips that programs are compiled for, one table, every number with its source.

Sources:
  [cloud]  Google Cloud's TPU pages, one per generation (docs.cloud.google.com/tpu/docs/v5e, ...)
  [jax]    the table of TPU generations in jax (jax/_src/tpu_info.py, 0.12)
  [xla]    XLA's GPU target descriptions (openxla/xla, xla/backends/gpu/target_config/specs)
  [nvidia] NVIDIA's data sheets and white papers of its architectures; where they give the rate with
           2:4 sparsity, half of it, and where they tell, the one with float32 sums
  [cuda]   CUDA programming guide, technical specifications per compute capability
  [book]   "How to scale your model" (jax-ml.github.io/scaling-book), hardware tables
  [calc]   arithmetic on the numbers beside it
"""

from dataclasses import replace

from pallas_kernels.chip import Chip

KIB, MIB, GIB = 2**10, 2**20, 2**30

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
        device_kinds=("NVIDIA H200", "NVIDIA H200 141GB HBM3e"),  # the latter [xla]
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

_ROWS = {c.name: c for c in _CHIPS}

# What differs from a chip of the same generation.
_SIBLINGS = (
    replace(
        _ROWS["a100"],
        name="a100-40gb",
        hbm_bytes=42_331_013_120,  # [xla]
        hbm_bytes_per_s=1555e9,  # [xla]
        device_kinds=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
    ),
    replace(
        _ROWS["a100"],
        name="a100-pcie",
        hbm_bytes=80_000_000_000,  # [nvidia] 80 GB
        hbm_bytes_per_s=1935e9,  # [nvidia]
        device_kinds=("NVIDIA A100 80GB PCIe",),
    ),
    replace(
        _ROWS["l4"],
        name="l40s",
        cores=142,  # [nvidia]
        bf16_flops_per_s=362e12,  # [nvidia]
        fp8_flops_per_s=733e12,  # [nvidia]
        int8_ops_per_s=733e12,  # [nvidia]
        hbm_bytes=48_000_000_000,  # [nvidia] 48 GB (GDDR6)
        hbm_bytes_per_s=864e9,  # [nvidia]
        clock_hz=2.52e9,  # [nvidia]
        device_kinds=("NVIDIA L40S",),
        l2_bytes=96 * MIB,  # [nvidia]
    ),
    replace(
        _ROWS["l4"],
        name="rtx4090",
        cores=128,  # [nvidia]
        bf16_flops_per_s=165e12,  # [nvidia]
        fp8_flops_per_s=330e12,  # [nvidia]
        int8_ops_per_s=661e12,  # [nvidia]
        hbm_bytes_per_s=1008e9,  # [nvidia] (GDDR6X)
        clock_hz=2.52e9,  # [nvidia]
        device_kinds=("NVIDIA GeForce RTX 4090",),
        l2_bytes=72 * MIB,  # [nvidia]
    ),
    replace(
        _ROWS["h100"],
        name="h100-pcie",
        cores=114,  # [xla]
        bf16_flops_per_s=757e12,  # [calc] from [xla]: 114 SMs x 4 x 512 x 2 x 1.622e9
        fp8_flops_per_s=1514e12,  # [calc] from [xla]: twice that
        int8_ops_per_s=1514e12,  # [calc] from [xla]
        hbm_bytes_per_s=2039e9,  # [xla]
        link_bytes_per_s=600e9,  # [nvidia] NVLink bridge
        clock_hz=1.755e9,  # [xla]
        device_kinds=("NVIDIA H100 PCIe",),
    ),
    replace(
        _ROWS["h100"],
        name="h100-nvl",
        bf16_flops_per_s=835.5e12,  # [nvidia] 1671e12 with sparsity
        fp8_flops_per_s=1670.5e12,  # [nvidia] 3341e12 with sparsity
        int8_ops_per_s=1670.5e12,  # [nvidia] 3341e12 with sparsity
        hbm_bytes=94_000_000_000,  # [nvidia] 94 GB
        hbm_bytes_per_s=3900e9,  # [nvidia]
        link_bytes_per_s=600e9,  # [nvidia] NVLink bridge
        clock_hz=1.545e9,  # [calc] 835.5e12 / (132 SMs x 4 x 512 x 2)
        device_kinds=("NVIDIA H100 NVL",),
    ),
    replace(
        _ROWS["h200"],
        name="h200-nvl",
        bf16_flops_per_s=835.5e12,  # [nvidia] 1671e12 with sparsity
        fp8_flops_per_s=1670.5e12,  # [nvidia] 3341e12 with sparsity
        int8_ops_per_s=1670.5e12,  # [nvidia] 3341e12 with sparsity
        hbm_bytes=141_000_000_000,  # [nvidia] 141 GB
        clock_hz=1.545e9,  # [calc] 835.5e12 / (132 SMs x 4 x 512 x 2)
        device_kinds=("NVIDIA H200 NVL",),
    ),
    replace(
        _ROWS["b200"],
        name="gb200",  # one of its GPUs
        cores=152,  # [xla]
        bf16_flops_per_s=2398e12,  # [calc] from [xla]: 152 SMs x 4 x 1024 x 2 x 1.926e9
        fp8_flops_per_s=4796e12,  # [calc] from [xla]: twice that
        int8_ops_per_s=4796e12,  # [calc] from [xla]
        hbm_bytes=197_897_748_480,  # [xla]
        hbm_bytes_per_s=7928e9,  # [xla]
        clock_hz=2.062e9,  # [xla]
        device_kinds=("NVIDIA GB200",),
        l2_bytes=135_528_448,  # [xla]
    ),
    replace(
        _ROWS["l4"],
        name="rtx5090",
        cores=170,  # [nvidia]
        bf16_flops_per_s=209.5e12,  # [nvidia]
        fp8_flops_per_s=419e12,  # [nvidia]
        int8_ops_per_s=838e12,  # [nvidia]
        hbm_bytes=32_000_000_000,  # [nvidia] 32 GB (GDDR7)
        hbm_bytes_per_s=1792e9,  # [nvidia]
        link_bytes_per_s=128e9,  # [nvidia] PCIe 5 x16
        clock_hz=2.407e9,  # [nvidia]
        matmul_dtypes=(*_HOPPER_DTYPES, "float4_e2m1fn"),  # [nvidia]
        device_kinds=("NVIDIA GeForce RTX 5090",),
        l2_bytes=96 * MIB,  # [nvidia]
        compute_capability=(12, 0),  # [cuda]; shared memory as 8.9
    ),
)

CHIPS: dict[str, Chip] = _ROWS | {c.name: c for c in _SIBLINGS}


def chip_of_device(device_kind: str) -> Chip | None:
    """The chip that jax calls so; None for any other, the host's CPU among them."""
    return next((c for c in CHIPS.values() if device_kind in c.device_kinds), None)


def chip(name: str) -> Chip:
    """The chip of this name; ValueError lists the known ones."""
    if name not in CHIPS:
        raise ValueError(f"there is no chip {name!r}; known: {', '.join(CHIPS)}")
    return CHIPS[name]
