"""The Mosaic GPU kernel broken on purpose: inputs and tolerance tell each from the right one."""

import inspect
import sys
import types

import jax
import pytest

from pallas_kernels.paged_attention import (
    gpu_mosaic,
    gpu_mosaic_consumer,
    gpu_mosaic_kernel,
    gpu_mosaic_ring,
    gpu_mosaic_softmax,
)
from pallas_kernels.paged_attention.cases import Case, make_inputs
from tests.pallas_kernels.paged_attention.attention_oracle import excess
from tests.pallas_kernels.paged_attention.mosaic_runs import (
    decode_sizes,
    jitted,
    needs_interpreter,
    run,
)

pytestmark = needs_interpreter
RING = {
    "drops the last page": ("page_size), *columns)", "page_size), columns[0], columns[1] - 1)"),
    "pages of the other slot": ("table_ref[work.slot,", "table_ref[1 - work.slot,"),
    "keys for values": ("(page * 2 + part)", "(page * 2)"),
    "pages of the next head": ("num_kv_heads + work.head, pl", "num_kv_heads + 1 - work.head, pl"),
}
SOFTMAX = {
    "window of one more": ("x_MB > last_MB - window", "x_MB >= last_MB - window"),
    "window of one less": ("x_MB > last_MB - window", "x_MB > last_MB - window + 1"),
    "sees the next token": ("x_MB <= last_MB", "x_MB <= last_MB + 1"),
    "scores unscaled": ("(2 * LOG2E * scale / softcap)", "(2 * LOG2E / softcap)"),
    "no cap": ("if softcap is None:", "if True:"),
    "sink in every part": ("work.parts == 1", "work.parts > 0"),
    "old sum not rescaled": ("sum_M * shrink_M +", "sum_M +"),
}
KERNEL = {
    "old output not rescaled": ("o_MF * columns(shrink_M, WIDTH) +", "o_MF +"),
    "values of nobody kept": ("jnp.where(seen_BF, v_BF, jnp.zeros_like(v_BF))", "v_BF"),
    "tokens not distinguished": ("lax.div(r_M, plan.group)\n", "0 * r_M\n"),
    "parts not normalised": ("1 / jnp.where(sum_M == 0, 1.0, sum_M)", "1 + 0 * sum_M"),
    "columns of a part twice": (
        "consumer.first_column + j * WIDTH, WIDTH)\n                _put",
        "consumer.first_column, WIDTH)\n                _put",
    ),
}
CONSUMER = {
    "both consumers' columns alike": ("return self.share * self.width", "return 0 * self.share"),
}


def broken(module, right, wrong):
    source = inspect.getsource(module)
    assert source.count(right) == 1, "the kernel has changed: write the mutant anew"
    copy = types.ModuleType(module.__name__)
    sys.modules[copy.__name__], mine = copy, sys.modules[copy.__name__]
    try:
        exec(compile(source.replace(right, wrong), "broken", "exec"), copy.__dict__)
    finally:
        sys.modules[copy.__name__] = mine
    return copy


# All keys count alike and one too many shows; few keys count and so does how blocks are summed up;
# consumers share the columns.
CALLS = (
    (Case("flat", 4, 2, 64, 16, (3, 1), (150, 147), window=83, softcap=2.0, sinks=True), 1, 1),
    (Case("sharp", 4, 2, 128, 16, (3, 1), (310, 307), softcap=20.0), 8, 1),
    (Case("wide", 2, 1, 256, 16, (3, 1), (150, 30)), 1, 2),
)


@pytest.mark.parametrize("mutant", [None, *RING, *SOFTMAX, *KERNEL, *CONSUMER])
def test_broken_kernels_fail(mutant, monkeypatch):
    """Calls that use everything tell each broken kernel from the right one."""
    if mutant in RING:
        monkeypatch.setattr(gpu_mosaic_kernel, "load", broken(gpu_mosaic_ring, *RING[mutant]).load)
    elif mutant in SOFTMAX:
        copy = broken(gpu_mosaic_softmax, *SOFTMAX[mutant])
        monkeypatch.setattr(gpu_mosaic_kernel, "softmax", copy)
    elif mutant in CONSUMER:
        copy = broken(gpu_mosaic_consumer, *CONSUMER[mutant])
        monkeypatch.setattr(gpu_mosaic_kernel, "Consumer", copy.Consumer)
    elif mutant:
        copy = broken(gpu_mosaic_kernel, *KERNEL[mutant])
        monkeypatch.setattr(gpu_mosaic, "attention", copy.attention)

    def right(case, gain, shares):
        inputs = make_inputs(case, dtype="bfloat16")
        inputs = inputs._replace(q_TNH=gain * inputs.q_TNH)
        sizes = decode_sizes(case, streams=1, part_keys=1, shares=shares)
        out_TNH, spec = run(case, inputs, sizes, attend=jitted())
        return excess(out_TNH, case, inputs, spec) <= 1

    assert all(right(*call) for call in CALLS) == (mutant is None)


def test_a_race_is_found(monkeypatch):
    """That `test_no_races` can fail: outputs are copied before they are committed. Stores and the
    copy are one warpgroup's, so that what is found does not depend on how threads take turns."""
    loop = "\n\n        @pl.loop(0, consumer.tokens(work))"
    copy = broken(gpu_mosaic_kernel, "plgpu.commit_smem()" + loop, loop)
    monkeypatch.setattr(gpu_mosaic, "attention", copy.attention)
    case = Case("race", 2, 1, 64, 16, (1,), (70,))
    inputs, sizes = make_inputs(case, dtype="bfloat16"), decode_sizes(case, streams=1, parts=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        run(case, inputs, sizes, attend=jitted(races=True))
