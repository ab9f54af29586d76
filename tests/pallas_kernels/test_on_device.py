"""The checks of `on_device.py` where there is no device: what each kernel takes, and rehearsals."""

import functools
import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import chip
from pallas_kernels.paged_attention.cases import make_inputs
from pallas_kernels.paged_attention.gpu_mosaic import JAX_FROM
from tests.pallas_kernels import on_device
from tests.pallas_kernels.on_device import (
    Kernel,
    checks,
    drawn,
    neighbours,
    poison,
    report_of,
    split,
)
from tests.pallas_kernels.paged_attention.mosaic_runs import INTERPRETER, needs_interpreter

SMALL = replace(chip("h200"), cores=1)  # fewer programs to interpret
NARROW = {"narrow int8", "narrow float8_e4m3fn", "narrow float8_e5m2"}
# Heads of 96 and 80, pages of 256.
UNUSUAL = {"phi_3_mini_decode", "h2o_danube_1_8b_prefill", "qwen_3_0_6b_contiguous"}


def refused(impl: str, each) -> set[str]:
    """Names of the checks that the implementation does not take; nothing is computed."""
    found = set()
    for name, kernel, function in checks(each, interpret=False):
        if kernel == impl and name != "large pool":
            function.args[0].attend = lambda q_TNH, *_, **__: np.zeros(q_TNH.shape, q_TNH.dtype)
            row = report_of(name, impl, function)
            assert row["ok"], row
            found |= {name} if "refused" in row else set()
    return found


@pytest.fixture(scope="module")
def inputs_once():
    return functools.cache(make_inputs)


@pytest.fixture
def nothing_computed(monkeypatch, inputs_once):
    monkeypatch.setattr(on_device, "excess", lambda *_: 0.0)
    monkeypatch.setattr(on_device, "packed", lambda pages, _: pages)
    monkeypatch.setattr(on_device, "make_inputs", inputs_once)
    monkeypatch.setattr(on_device, "DRAWS", 1)


# What must not matter is up to 1e30, which is infinite in float16.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(
    ("name", "expected"), [("h200", set()), ("a100", NARROW - {"narrow int8"})]
)
def test_the_triton_kernels_are_given_what_they_take(name, expected, nothing_computed):
    assert refused("gpu_triton", chip(name)) == expected


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.skipif(jax.__version_info__ < JAX_FROM, reason="the kernel needs jax 0.11")
def test_the_mosaic_kernel_is_given_what_it_takes(nothing_computed):
    float32 = {name for name, *_ in checks(chip("h200"), False) if name.endswith("float32")}
    unusual = {f"{name} bfloat16" for name in UNUSUAL}
    assert refused("gpu_mosaic", chip("h200")) == NARROW | unusual | float32


def test_kernels_take_turns_and_bfloat16_comes_before_other_dtypes():
    order = [(name, impl) for name, impl, _ in checks(chip("h200"), False)]
    assert order[:4] == [
        ("long bfloat16", "gpu_mosaic"),
        ("long bfloat16", "gpu_triton"),
        ("split", "gpu_mosaic"),
        ("split", "gpu_triton"),
    ]
    dtypes = [name.split()[-1] for name, _ in order]
    last_bfloat16 = len(dtypes) - 1 - dtypes[::-1].index("bfloat16")
    assert last_bfloat16 < min(dtypes.index("float16"), dtypes.index("float32"))
    assert len(set(order)) == len(order)


@pytest.mark.parametrize("check", [split, poison, neighbours])
def test_rehearsed_with_the_triton_kernels(check, monkeypatch):
    monkeypatch.setattr(on_device, "PARTS", (3, 32))
    assert check(Kernel("gpu_triton", SMALL, interpret=True)) <= 1


@needs_interpreter
@pytest.mark.parametrize("check", [split, poison])
def test_rehearsed_with_the_mosaic_kernel(check, monkeypatch):
    monkeypatch.setattr(on_device, "PARTS", (3,))
    assert check(Kernel("gpu_mosaic", SMALL, interpret=INTERPRETER())) <= 1


@pytest.mark.parametrize("name", on_device.DRAWN)
@pytest.mark.parametrize(
    "impl", ["gpu_triton", pytest.param("gpu_mosaic", marks=needs_interpreter)]
)
def test_drawn_lengths_rehearsed(impl, name, monkeypatch):
    monkeypatch.setattr(on_device, "DRAWS", 2)
    interpret = INTERPRETER() if impl == "gpu_mosaic" else True
    assert drawn(Kernel(impl, SMALL, interpret), name) <= 1


def test_a_wrong_kernel_fails():
    kernel = Kernel("gpu_triton", SMALL)
    kernel.attend = lambda q_TNH, *_, **__: jnp.zeros_like(q_TNH)
    row = report_of("split", "gpu_triton", lambda: split(kernel))
    assert not row["ok"]
    assert row["excess"] > 1
    kernel.attend = lambda q_TNH, *_, **__: q_TNH
    assert report_of("split", "gpu_triton", lambda: split(kernel))["excess"] == "infinite"


def test_checks_that_would_end_too_late_are_named_and_not_begun(monkeypatch, capsys):
    now_s = [0.0]

    def two_seconds():
        now_s[0] += 2
        return 0.5

    made = [(name, "gpu_triton", two_seconds) for name in "abcd"]
    monkeypatch.setattr(on_device, "checks", lambda *_: made)
    monkeypatch.setattr(on_device.time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(sys, "argv", ["on_device.py", "--interpret", "--seconds", "5"])
    with pytest.raises(SystemExit) as ended:
        on_device.main()
    assert ended.value.code == 0
    *rows, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [row["check"] for row in rows] == ["a", "b"]
    assert last == {"not_run": ["c (gpu_triton)", "d (gpu_triton)"]}
