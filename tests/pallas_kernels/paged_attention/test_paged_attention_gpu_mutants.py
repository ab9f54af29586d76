"""Triton kernels broken on purpose: the tests' inputs and tolerance tell each from the right."""

import inspect
import sys
import types

import pytest

from pallas_kernels.paged_attention import gpu_triton, gpu_triton_kernel
from pallas_kernels.paged_attention.cases import Case, make_inputs
from pallas_kernels.paged_attention.gpu_triton_sizes import Sizes
from tests.pallas_kernels.paged_attention.attention_oracle import excess
from tests.pallas_kernels.paged_attention.gpu_runs import jitted, run

MUTANTS = {
    "drops the last key": ("(x_B <= last)", "(x_B < last)"),
    "reads past the end": ("(x_B <= last)", "(x_B <= last + 1)"),
    "reads below the window": ("(x_B >= first)", "(x_B >= first - 1)"),
    "window of one more": ("> position_M1 - plan.window", ">= position_M1 - plan.window"),
    "window of one less": ("> position_M1 - plan.window", "> position_M1 - plan.window + 1"),
    "sees the next token": ("<= position_M1)", "<= position_M1 + 1)"),
    "scores unscaled": ("(plan.scale / plan.softcap)", "(1 / plan.softcap)"),
    "no cap": ("score_MB = jnp.tanh(", "score_MB = ("),
    "sink in every part": ("jnp.where(parts == 1, sink_M * LOG2E, -jnp.inf)", "sink_M * LOG2E"),
    "no sink in the sum of parts": ("if sinks_ref else jnp.float32(-jnp.inf)", "* 0.0 - 99.0"),
    "old output not rescaled": ("o_MH * shrink_M[:, None] +", "o_MH +"),
    "old sum not rescaled": ("sum_M * shrink_M +", "sum_M +"),
    "parts weighed alike": ("jnp.exp2(log_E - new_max)", "jnp.exp2(log_E * 0)"),
    "parts not normalised": ("v_scale / jnp.where(sum_M == 0, 1.0, sum_M)", "v_scale + 0 * sum_M"),
    "one part too few": ("e_E < parts", "e_E < parts - 1"),
    "one part too many": ("e_E < parts", "e_E < parts + 1"),
    "pages of the next slot": ("table_ref.at[slot,", "table_ref.at[slot + 1,"),
    "values are keys": ("read(1)", "read(0)"),
    "heads of the next group": ("n_M = k * plan.group", "n_M = (1 - k) * plan.group"),
    "tokens not distinguished": ("position + token_M[:, None]", "position + 0 * token_M[:, None]"),
    "rows of nobody not cleared": ("parts == 0", "parts < 0"),
    "last unit missing": ("trips, attend_unit", "trips - 1, attend_unit"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_broken_kernels_fail(mutant, monkeypatch):
    """A call that uses everything tells each broken kernel from the right one."""
    if mutant:
        source = inspect.getsource(gpu_triton_kernel)
        right, wrong = MUTANTS[mutant]
        assert source.count(right) == 1, "the kernel has changed: write the mutant anew"
        broken = types.ModuleType(gpu_triton_kernel.__name__)
        sys.modules[broken.__name__], mine = broken, sys.modules[broken.__name__]
        try:
            exec(compile(source.replace(right, wrong), "broken", "exec"), broken.__dict__)
        finally:
            sys.modules[broken.__name__] = mine
        monkeypatch.setattr(gpu_triton, "attention", broken.attention)
        monkeypatch.setattr(gpu_triton, "combine", broken.combine)
    case = Case("all", 4, 2, 16, 4, (3, 1, 2), (60, 17, 2), window=43, softcap=2.0, sinks=True)
    inputs = make_inputs(case)
    sizes = (Sizes(3, 16, 16, 3, 20, programs=2),)
    out_TNH, spec = run(case, inputs, sizes, attend=jitted())
    assert (excess(out_TNH, case, inputs, spec) <= 1) == (mutant is None)
