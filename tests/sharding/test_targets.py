"""Names of targets: what they mean, and what is wrong with those that mean nothing."""

import re

import pytest

from pallas_kernels.chips import CHIPS
from sharding.targets import gpu_description, missing_compiler, parse_target


@pytest.mark.parametrize(
    ("name", "platform", "devices"),
    [
        ("cpu", "cpu", 1),
        ("cpu:4", "cpu", 4),
        ("v6e", "tpu", 1),
        ("v5e:2x2", "tpu", 4),
        ("v5p:2x2x1", "tpu", 4),
        ("tpu7x", "tpu", 2),
        ("tpu7x:2x2x1", "tpu", 8),
        ("h100", "cuda", 1),
        ("b200:1x1x8", "cuda", 8),
    ],
)
def test_names_mean_a_number_of_devices(name, platform, devices):
    target = parse_target(name)
    assert (target.platform, target.num_devices) == (platform, devices)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("v7", "there is no chip 'v7'; known: v4"),
        ("v6e:", "'' is no topology"),
        ("v6e:0x2", "'0x2' is no topology"),
        ("v6e:2x2x1", "v6e has topologies of 2 axes, as v6e:2x2"),
        ("v5p:2x2", "v5p has topologies of 3 axes, as v5p:2x2x1"),
        ("h100:8", "h100 has topologies of 3 axes, as h100:1x1x8"),
        ("cpu:2x2", "a count, as in cpu:4"),
    ],
)
def test_names_that_mean_nothing_are_refused(name, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_target(name)


@pytest.mark.parametrize("c", [c for c in CHIPS.values() if c.kind == "gpu"], ids=lambda c: c.name)
def test_descriptions_of_gpus_agree_with_the_chip_table(c):
    text = gpu_description(c.name)

    def number(field: str) -> float:
        return float(re.search(rf"\b{field}: ([\d.]+)", text)[1])

    assert number("core_count") == c.cores
    assert number("device_memory_size") == c.hbm_bytes
    assert number("memory_bandwidth") == pytest.approx(c.hbm_bytes_per_s, rel=1e-3)
    assert number("l2_cache_size") == c.l2_bytes
    assert number("clock_rate_ghz") * 1e9 == pytest.approx(c.clock_hz)
    assert number("shared_memory_per_block_optin") == c.shared_memory_bytes
    assert number("shared_memory_per_core") == c.shared_memory_sm_bytes
    assert (number("major"), number("minor")) == c.compute_capability


@pytest.mark.parametrize(("name", "module"), [("v6e", "libtpu"), ("h100", "nvidia.cuda_nvcc")])
def test_an_absent_compiler_is_named_with_what_to_install(monkeypatch, name, module):
    monkeypatch.setattr("sharding.targets._installed", lambda wanted: wanted != module)
    assert missing_compiler(parse_target(name)) == (
        f"compiling for {name} needs {module}, not installed here; run: pip install -e '.[aot]'"
    )
    assert missing_compiler(parse_target("cpu")) is None
