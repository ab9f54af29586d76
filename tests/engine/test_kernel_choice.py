"""Whose kernels an engine uses, and what the machine is taken for."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from engine.engine_args import EngineArgs, engine_config
from engine.kernel_choice import PLAIN, calls, kernel_chip
from engine.llm import LLM
from engine.platform import attached_chip, unknown_accelerator
from models.kv_cache import init_cache, page_bytes, pool_shape
from models.model import cache_specs
from models.presets import preset
from pallas_kernels.chips import CHIPS, chip, chip_of_device
from pallas_kernels.paged_attention import choose
from pallas_kernels.paged_attention.layout import default_page_size
from tests.tiny import tiny_config, tiny_params

V6E = chip("v6e")
SMOLLM2 = preset("smollm2-135m")


def sizes(**changes):
    standard = {"max_num_seqs": 32, "max_model_len": 2048, "num_pages": 1025, "page_size": 64}
    return engine_config(**standard | {"token_budget": 256} | changes)


def test_a_device_is_a_chip_only_under_its_exact_name():
    known = {kind: c.name for c in CHIPS.values() for kind in c.device_kinds}
    assert len(known) == sum(len(c.device_kinds) for c in CHIPS.values())
    for kind, name in known.items():
        assert chip_of_device(kind).name == name
    for kind in ("cpu", "NVIDIA L40", "NVIDIA H20", "TPU v2", "TPU v60", "", "Interpreter"):
        assert chip_of_device(kind) is None


def test_on_this_cpu_no_chip_is_attached_and_pages_hold_16():
    assert attached_chip() is None
    config = EngineArgs(num_pages=40, max_model_len=64).engine_config(SMOLLM2, jnp.float32)
    assert config.page_size == default_page_size(None) == 16
    assert default_page_size(chip("h100")) == 16
    assert default_page_size(V6E) == 64


def test_a_tpu_uses_its_kernel_where_that_takes_every_call():
    for name in ("smollm2-135m", "llama-3.1-8b", "gemma-3-1b"):
        assert kernel_chip(preset(name), sizes(), jnp.bfloat16, V6E) == (V6E, None)
    found = calls(SMOLLM2, sizes(), (256,), jnp.bfloat16, V6E)
    assert len(found) == 2  # equal layers make equal calls
    assert {spec.num_pages for spec in found} == {1025}


@pytest.mark.parametrize("token_budget", [16, 128, 256])
def test_a_chip_that_is_chosen_takes_the_calls_of_all_programs(token_budget):
    """Llama 3.2 1B on a v4 has no kernel for passes of 16 tokens."""
    fallbacks = set()
    for chip_name in CHIPS:
        for name in ("llama-3.2-1b", "gemma-3-270m", "llama-3.1-8b", "phi-3-mini-4k"):
            config = sizes(token_budget=token_budget, page_size=16, num_pages=4097)
            where = preset(name), config, jnp.bfloat16
            found, reason = kernel_chip(*where, chip(chip_name))
            if found is None:
                fallbacks.add((chip_name, name))
                assert reason
                continue
            budgets = config.program_budgets
            assert budgets[-1] == token_budget
            for spec in calls(preset(name), config, budgets, jnp.bfloat16, found):
                assert choose(spec, found) not in PLAIN
    if token_budget == 16:
        assert fallbacks == {("v4", "llama-3.2-1b")}
    else:
        assert not fallbacks


def test_every_program_is_asked_for(monkeypatch):
    asked = []

    def recorded(spec, *others):
        asked.append(spec.max_q_len)
        return choose(spec, *others)

    monkeypatch.setattr("engine.kernel_choice.choose", recorded)
    assert sizes().program_budgets == (32, 64, 256)
    assert kernel_chip(SMOLLM2, sizes(), jnp.bfloat16, V6E) == (V6E, None)
    assert asked == [1, 32, 64, 256]


def test_plain_xla_was_asked_for_or_is_the_fallback_with_its_reason():
    assert kernel_chip(SMOLLM2, sizes(), jnp.bfloat16, V6E, "xla") == (None, None)
    assert kernel_chip(SMOLLM2, sizes(), jnp.float32, None) == (None, None)
    large = sizes(max_num_seqs=2048, page_size=16)
    found, reason = kernel_chip(SMOLLM2, large, jnp.bfloat16, V6E)
    assert found is None
    assert "tpu: page table of 2048 slots x 128 pages is 1,048,576 bytes" in reason


def test_an_accelerator_without_a_row_in_the_table_is_told(monkeypatch):
    """It would run slowly with nobody knowing why."""
    assert unknown_accelerator() is None
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H20")
    monkeypatch.setattr("engine.platform.jax.devices", lambda: [device])
    assert attached_chip() is None
    unknown = unknown_accelerator()
    assert unknown == "NVIDIA H20"
    reason = "the chip table (pallas_kernels/chips.py) has no row for 'NVIDIA H20'"
    where = SMOLLM2, sizes(), jnp.bfloat16, None
    assert kernel_chip(*where, unknown=unknown) == (None, reason)
    assert kernel_chip(*where, "xla", unknown=unknown) == (None, None)
    with pytest.raises(ValueError, match="impl 'gpu_triton': the chip table"):
        kernel_chip(*where, "gpu_triton", unknown=unknown)
    device.device_kind = "NVIDIA H100 PCIe"
    assert unknown_accelerator() is None


def test_the_engine_warns_once_of_such_an_accelerator(monkeypatch):
    monkeypatch.setattr("engine.engine_args.unknown_accelerator", lambda: "NVIDIA H20")
    config = tiny_config()
    with pytest.warns(UserWarning, match="the chip table .* has no row for 'NVIDIA H20'") as said:
        LLM.from_params(config, tiny_params(config), max_num_seqs=2, max_model_len=64)
    assert len(said) == 1


def test_a_kernel_asked_for_by_name_is_refused_at_set_up():
    with pytest.raises(ValueError, match="impl 'tpu': needs a TPU, the call is for the host CPU"):
        kernel_chip(SMOLLM2, sizes(), jnp.float32, None, "tpu")
    with pytest.raises(ValueError, match="page size 8: must be a multiple of 16"):
        kernel_chip(SMOLLM2, sizes(page_size=8), jnp.bfloat16, V6E, "tpu")


def test_a_split_cache_is_the_devices_own_caches_side_by_side():
    """8 KV heads of 64: two share a row on one device and on two; of 4 on 4 devices each is alone
    beside its values."""
    (spec, *_) = cache_specs(preset("llama-3.2-1b"))
    assert (spec.num_kv_heads, spec.head_dim) == (8, 64)
    assert pool_shape(spec, 3, 16, V6E) == (3, 2, 4, 16, 128)
    assert pool_shape(spec, 3, 16, V6E, parts=2) == (3, 2, 4, 16, 128)
    assert pool_shape(spec, 3, 16, V6E, parts=8) == (3, 1, 8, 16, 128)
    assert pool_shape(spec, 3, 16, None, parts=8) == (3, 2, 8, 16, 64)


def test_bytes_of_a_page_are_those_that_the_cache_takes():
    for name in (
        "smollm2-135m",
        "phi-3-mini-4k",
    ):  # rows that heads share, rows filled up with zeros
        specs = cache_specs(preset(name))[:2]
        for each in (None, V6E):
            cache = init_cache(specs, 3, 16, jnp.bfloat16, each)
            held_bytes = sum(layer.nbytes for layer in cache.layers)
            assert 3 * page_bytes(specs, 16, jnp.bfloat16, each) == held_bytes
