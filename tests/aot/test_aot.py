"""The lab itself, on programs small enough to know what the compiler must say."""

import functools

import pytest

from sharding.aot import compile_for


@functools.cache
def compiled(name: str, target: str, kernels: bool = False, **arguments):
    return compile_for(f"tests.aot.programs:{name}", arguments, target, kernels=kernels)


@pytest.mark.parametrize(
    ("target", "devices"), [("v6e:2x2", 4), ("h100:1x1x8", 8), ("cpu:4", 4), ("tpu7x", 2)]
)
def test_b81_a_contraction_over_the_split_axis_ends_in_one_all_reduce(target, devices):
    result = compiled("split_matmul", target, width=1024)
    assert result.error is None
    assert result.num_devices == devices
    assert result.collectives == {"all-reduce": 1}
    assert result.part_bytes == {"w": 1024 * 128 * 4 // devices}
    assert result.argument_bytes == (8 + 128) * 1024 * 4 // devices


@pytest.mark.parametrize("target", ["v5e", "h100", "cpu"])
def test_a_donated_array_is_updated_in_place_and_a_kept_one_is_copied(target):
    donated = compiled("in_place", target, rows=4096, donate=True)
    kept = compiled("in_place", target, rows=4096, donate=False)
    pool_bytes = 4096 * 256 * 4
    assert donated.alias_bytes == pool_bytes
    assert donated.watched_copies == ()
    assert donated.peak_bytes < 1.2 * pool_bytes
    assert kept.alias_bytes == 0
    assert len(kept.watched_copies) == 1
    assert kept.peak_bytes >= 2 * pool_bytes


def test_a_program_that_does_not_fit_is_refused_in_the_compilers_words():
    result = compiled("too_large", "v6e")
    assert "memory" in result.error
    assert result.main is None


def test_loops_are_found_with_their_trips():
    for target in ("v5e", "h100"):
        loops = [
            r for r in compiled("running_sum", target, trips=9).main.walk() if r.kind != "main"
        ]
        assert [(r.kind, r.trips) for r in loops] == [("loop", 9)]
        assert loops[0].ops


def test_a_pallas_kernel_on_tpu_reports_the_bundles_of_its_grid():
    (kernel,) = compiled("doubled_by_kernel", "v6e", kernels=True, blocks=16).kernels
    assert "doubled" in kernel.name
    # Outside of the grid's loop: set-up. Inside: at least a load, a multiplication and a store.
    outside, inside = kernel.bundles_by_depth
    assert kernel.bundles == outside + inside
    assert 3 <= inside <= 200


def test_gpu_kernels_report_registers_and_spills():
    result = compiled("running_sum", "h100", kernels=True, trips=9)
    assert result.kernels
    for kernel in result.kernels:
        assert 8 <= kernel.registers <= 255
        assert kernel.spill_bytes == 0


def test_wrong_questions_are_refused_before_a_compiler_runs():
    with pytest.raises(ValueError, match="rows must be even, got 3"):
        compiled("refuses", "cpu", rows=3)
    with pytest.raises(ValueError, match="v6e:9x9: no such topology"):
        compiled("split_matmul", "v6e:9x9", width=1024)
