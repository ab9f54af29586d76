"""The chip table: complete for each kind, consistent within itself, and unknown names refused."""

import jax.numpy as jnp
import pytest

from pallas_kernels.chips import CHIPS, chip

TPUS = [c for c in CHIPS.values() if c.kind == "tpu"]
GPUS = [c for c in CHIPS.values() if c.kind == "gpu"]


def test_an_unknown_chip_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no chip 'v7'; known: v4, v5e, .*b200"):
        chip("v7")
    assert chip("v6e").hbm_bytes == 32 * 2**30


@pytest.mark.parametrize("c", CHIPS.values(), ids=CHIPS)
def test_each_kind_states_its_own_memories(c):
    on_tpu = (c.vmem_bytes, c.smem_bytes)
    on_gpu = (c.shared_memory_bytes, c.shared_memory_sm_bytes, c.l2_bytes, c.compute_capability)
    stated, absent = (on_tpu, on_gpu) if c.kind == "tpu" else (on_gpu, on_tpu)
    assert all(stated)
    assert not any(absent)
    for name in c.matmul_dtypes:
        jnp.dtype(name)  # a dtype that jax knows
    assert c.multiplies("bfloat16")


@pytest.mark.parametrize("c", TPUS, ids=[c.name for c in TPUS])
def test_tpu_clocks_agree_with_the_peak_rate(c):
    # bf16 multiply-adds per core and cycle of the generation's matrix units.
    per_cycle = 4 * 128**2 if c.name in ("v4", "v5e", "v5p") else 4 * 256**2
    flops_per_cycle = 2 * per_cycle * c.cores
    assert c.clock_hz == pytest.approx(c.bf16_flops_per_s / flops_per_cycle, rel=0.01)


@pytest.mark.parametrize("c", GPUS, ids=[c.name for c in GPUS])
def test_gpu_rates_fit_multiprocessors_and_clock(c):
    # Dense bf16 multiply-adds per SM and cycle, half as many on GeForce with float32 sums.
    rates = {(8, 0): 1024, (8, 9): 512, (9, 0): 2048, (10, 0): 4096, (12, 0): 512}
    per_cycle = rates[c.compute_capability] // (2 if "GeForce" in c.device_kinds[0] else 1)
    at_boost = 2 * per_cycle * c.cores * c.clock_hz
    # Published peaks assume a clock a little below the highest one.
    assert 0.9 * at_boost <= c.bf16_flops_per_s <= 1.01 * at_boost


def test_memory_of_a_chip_is_split_over_its_devices():
    ironwood = chip("tpu7x")
    assert ironwood.device_hbm_bytes * 2 == ironwood.hbm_bytes
    # 8 MiB at half of 7.38 TB/s and 2.2 GHz.
    assert ironwood.hbm_cycles(8 * 2**20) == pytest.approx(5001, rel=1e-3)
