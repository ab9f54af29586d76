"""TPU kernels broken on purpose: the tests' inputs and tolerance tell each from the right one."""

import inspect
import sys
import types

import pytest

from pallas_kernels.paged_attention import tpu, tpu_block, tpu_kernel
from pallas_kernels.paged_attention.cases import Case, make_inputs
from pallas_kernels.paged_attention.tpu_sizes import Sizes
from tests.pallas_kernels.paged_attention.attention_oracle import excess
from tests.pallas_kernels.paged_attention.tpu_runs import run

MUTANTS = {
    "drops the last page": (
        "lax.div(tiles.last_key[z], page_size) + 1 - column",
        "lax.div(tiles.last_key[z], page_size) - column",
    ),
    "window of one more": ("x_MB > position_MB - plan.window", "x_MB >= position_MB - plan.window"),
    "window of one less": (
        "x_MB > position_MB - plan.window",
        "x_MB > position_MB - plan.window + 1",
    ),
    "sees the next token": ("x_MB <= position_MB", "x_MB <= position_MB + 1"),
    "scores unscaled": ("inside = plan.scale / plan.softcap", "inside = 1 / plan.softcap"),
    "no cap": ("score_MB = jnp.tanh(score_MB)", "score_MB = score_MB"),
    "sink in every block": (
        "def run_round(round_, cursors):\n",
        "def run_round(round_, cursors):\n        scratch.sum[...] += 0.1\n",
    ),
    "old output not rescaled": ("acc[r] * over_lanes(shrink, lanes) + o_ML", "acc[r] + o_ML"),
    "old sum not rescaled": ("scratch.sum[r] * shrink +", "scratch.sum[r] +"),
    "stale values": ("jnp.where(real, x_RCL, 0.0)", "x_RCL"),
    "pages of the next slot": ("entry = tiles.slot[z] *", "entry = (tiles.slot[z] + 1) *"),
    "values are keys": ("page_row(parts - 1, r)", "page_row(0, r)"),
    "queries not distinguished": ("& (plan.queries - 1)", "& 0"),
}  # fmt: skip


def broken(module, mutant):
    """The module with the mutant's line, or None if it has not the right one."""
    source = inspect.getsource(module)
    right, wrong = MUTANTS[mutant]
    if right not in source:
        return None
    assert source.count(right) == 1, f"{right!r} is not one place"
    copy = types.ModuleType(module.__name__)
    mine = sys.modules[copy.__name__]
    sys.modules[copy.__name__] = copy  # dataclasses look their module up
    try:
        exec(compile(source.replace(right, wrong), "broken", "exec"), copy.__dict__)
    finally:
        sys.modules[copy.__name__] = mine
    return copy


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_broken_kernels_fail(mutant, monkeypatch):
    """A call that uses everything tells each broken kernel from the right one."""
    if mutant:
        loop, block = broken(tpu_kernel, mutant), broken(tpu_block, mutant)
        assert (loop is None) != (block is None), "the kernel has changed: write the mutant anew"
        if loop:
            monkeypatch.setattr(tpu, "kernel", loop.kernel)
        else:
            monkeypatch.setattr(tpu_kernel, "attend_block", block.attend_block)
            monkeypatch.setattr(tpu_kernel, "clear_outside", block.clear_outside)
    case = Case("all", 4, 1, 16, 4, (3, 1), (30, 17), window=11, softcap=2.0, sinks=True)
    inputs = make_inputs(case)
    out_TNH, spec = run(case, inputs, (Sizes(4, 2, 2),), lanes=1)
    assert (excess(out_TNH, case, inputs, spec) <= 1) == (mutant is None)
