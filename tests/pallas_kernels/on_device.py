"""The attention kernels compiled for the attached chip and run on it, against the float64 oracle.

    PYTHONPATH=. python -m tests.pallas_kernels.on_device

Every implementation of that kind of chip computes long sequences, splits, drawn lengths, the named
cases, narrow pages and a pool beyond 2^31 values: what serving uses first, in bfloat16. A check is
one JSON line: its `excess` is the largest error in units of the contract's tolerance, infinite if
any number is not finite, and must be at most 1; where bits must agree it is 0 or infinite. What an
implementation does not take is told in `refused`. No check begins that would end after `--seconds`,
going by the longest one so far; a line `not_run` names those. The exit code is 1 if a check fails.
pytest is not needed.
"""

import argparse
import functools
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.cli import run
from engine.platform import attached_chip
from pallas_kernels.cache_update import update_cache
from pallas_kernels.chips import Chip, chip
from pallas_kernels.paged_attention import IMPLEMENTATIONS, gpu_mosaic_sizes, gpu_triton_sizes
from pallas_kernels.paged_attention.cases import CASES, PADDING_ROWS, Case, Inputs, make_inputs
from pallas_kernels.paged_attention.layout import lanes_of, pages_shape, write_pages
from pallas_kernels.paged_attention.spec import KernelSpec, check
from tests.pallas_kernels.paged_attention.attention_oracle import excess
from tests.pallas_kernels.paged_attention.drawn import ROWS, SLOTS, drawn_inputs
from tests.pallas_kernels.paged_attention.tpu_runs import packed

LONG = Case("long", 8, 2, 128, 16, (1, 1, 0, 1, 4, 16), (8192, 5000, 0, 1, 513, 4096))
# At most 17 blocks of 64 keys.
SPLIT = Case("split", 6, 2, 64, 16, (1, 1, 3, 0, 2), (1040, 1, 300, 0, 130), sinks=True)
PARTS = (1, 2, 3, 5, 16, 32)
PLAIN = Case("plain", 8, 2, 128, 16, (1, 9, 1), (130, 140, 5), window=33)
NARROW = (
    ("int8", "bfloat16"),
    ("float8_e4m3fn", "bfloat16"),
    ("float8_e5m2", "float16"),
)
# Page size, heads, KV heads, head width, window, softcap, sinks.
DRAWN = {
    "drawn": (16, 8, 2, 64, None, None, False),
    "drawn_all": (16, 9, 3, 128, 7, 3.0, True),
}
DRAWS, DRAWN_KEYS = 12, 200  # keys of a slot at most: a few blocks
LARGE_VALUES = 1 << 31


class Refused(Exception):  # noqa: N818
    """The implementation does not take the call on this chip; the reason."""


class Kernel:
    """One implementation on one chip, or interpreted for it."""

    def __init__(self, name: str, each: Chip, interpret: Any = False):
        """`interpret` is what the implementation takes: a flag or Pallas' parameters."""
        self.name, self.chip = name, each
        how = {"interpret": interpret} if interpret else {}
        self.attend = jax.jit(
            functools.partial(IMPLEMENTATIONS[name].attend, chip=each, **how),
            static_argnames=("scale", "max_q_len", "window", "softcap", "sizes"),
        )

    def __call__(
        self, case: Case, inputs: Inputs, kv_scale_2K=None, max_q_len=None, sizes_of=None
    ) -> tuple[np.ndarray, KernelSpec]:
        """Output and the call's spec, from which `sizes_of` makes sizes; Refused if the
        implementation does not take it."""
        *arrays, sinks_N = inputs
        arrays[1] = packed(arrays[1], lanes_of(self.chip))
        static = {
            "scale": case.scale,
            "max_q_len": max_q_len or max(1, *case.q_lens),
            "window": case.window,
            "softcap": case.softcap,
        }
        per_head = {"sinks_N": sinks_N, "kv_scale_2K": kv_scale_2K}
        spec = check(*arrays, **static, **per_head)
        if reason := IMPLEMENTATIONS[self.name].supports(spec, self.chip):
            raise Refused(reason)
        sizes = {"sizes": sizes_of(spec)} if sizes_of else {}
        return np.asarray(self.attend(*arrays, **static, **per_head, **sizes)), spec

    def excess(self, case: Case, inputs: Inputs, **rest) -> float:
        out_TNH, spec = self(case, inputs, **rest)
        if not (out_TNH[sum(case.q_lens) :] == 0).all():
            return float("inf")  # rows that no slot owns must be 0
        return float(excess(np.float64(out_TNH), case, inputs, spec))


def same(a: np.ndarray, b: np.ndarray) -> float:
    return 0.0 if a.tobytes() == b.tobytes() else float("inf")


# ---- checks: each returns an excess --------------------------------------------------------------


def named(kernel: Kernel, case: Case, dtype: str) -> float:
    return kernel.excess(case, make_inputs(case, dtype=dtype))


def narrow(kernel: Kernel, kv_dtype: str, q_dtype: str) -> float:
    """The oracle reads the multiples that were stored, so only arithmetic differs."""
    case = Case("narrow", 8, 2, 128, 16, (1, 7, 2), (130, 140, 5))
    inputs = make_inputs(case, dtype=q_dtype)
    scale_2K = np.array([[0.02, 0.03], [0.05, 0.01]], np.float32)
    by_head = scale_2K[None, :, :, None, None]
    stored = np.clip(np.round(np.float32(inputs.kv_pages) / by_head), -100, 100)
    stored = np.nan_to_num(stored) if kv_dtype == "int8" else stored
    stored = jnp.asarray(stored, jnp.dtype(kv_dtype))
    out_TNH, spec = kernel(case, inputs._replace(kv_pages=stored), jnp.asarray(scale_2K))
    wide = inputs._replace(kv_pages=np.asarray(stored, np.float64) * by_head)
    return float(excess(np.float64(out_TNH), case, wide, spec))


def split(kernel: Kernel) -> float:
    """One to more parts than blocks."""
    if kernel.chip.kind != "gpu":
        raise Refused("does not split")
    inputs = make_inputs(SPLIT, dtype="bfloat16")

    def sizes_of(spec: KernelSpec, parts: int):
        if kernel.name == "gpu_mosaic":
            sizes = gpu_mosaic_sizes.default_sizes(spec, kernel.chip)
            return replace(sizes, parts=parts, part_keys=sizes.keys)
        (few,) = gpu_triton_sizes.default_sizes(spec, kernel.chip)
        return (replace(few, parts=parts, part_keys=few.keys),)

    return max(
        kernel.excess(SPLIT, inputs, sizes_of=functools.partial(sizes_of, parts=parts))
        for parts in PARTS
    )


def drawn(kernel: Kernel, name: str) -> float:
    rng, worst = np.random.default_rng(0), 0.0
    for seed in range(DRAWS):
        q_lens = rng.integers(0, 1 + ROWS // SLOTS, SLOTS)
        slots = [(int(q_len), int(rng.integers(q_len, DRAWN_KEYS + 1))) for q_len in q_lens]
        case, inputs = drawn_inputs(name, DRAWN[name], slots, seed, DRAWN_KEYS, "bfloat16")
        worst = max(worst, kernel.excess(case, inputs, max_q_len=ROWS))
    return worst


def poison(kernel: Kernel) -> float:
    """The same bits with all that must not matter set to 0 instead of NaN, inf and 1e30."""
    inputs = make_inputs(PLAIN, dtype="bfloat16")
    q_TNH, kv_pages = (jnp.where(jnp.abs(a) < 1e3, a, 0) for a in inputs[:2])
    clean = inputs._replace(q_TNH=q_TNH, kv_pages=kv_pages)
    return same(kernel(PLAIN, inputs)[0], kernel(PLAIN, clean)[0])


def neighbours(kernel: Kernel) -> float:
    """The same bits of a slot when the others have gone."""
    inputs = make_inputs(LONG, dtype="bfloat16")
    alone = jnp.arange(len(LONG.q_lens)) == 1
    gone = inputs._replace(
        q_len_S=jnp.where(alone, inputs.q_len_S, 0), kv_len_S=jnp.where(alone, inputs.kv_len_S, 0)
    )
    return same(kernel(LONG, inputs)[0][1], kernel(LONG, gone)[0][1])


def large_pool(kernel: Kernel) -> float:
    """The same bits when the pages stand at the end of more than 2^31 values."""
    case = Case("large", 8, 8, 128, 16, (1, 3), (200, 77))
    inputs = make_inputs(case, dtype="bfloat16")
    small = packed(jnp.asarray(inputs.kv_pages), lanes_of(kernel.chip))
    before = LARGE_VALUES // (small.size // small.shape[0])
    pool = jnp.concatenate([jnp.zeros((before, *small.shape[1:]), small.dtype), small])
    table_SM = jnp.where(inputs.page_table_SM < 0, -1, inputs.page_table_SM + before)
    static = {"scale": case.scale, "max_q_len": 3, "window": None, "softcap": None}
    arrays = (inputs.q_TNH, pool, table_SM, *inputs[3:6])
    spec = check(*arrays, **static, sinks_N=None)
    if reason := IMPLEMENTATIONS[kernel.name].supports(spec, kernel.chip):
        raise Refused(reason)
    out_TNH = np.asarray(kernel.attend(*arrays, **static, sinks_N=None))
    return same(out_TNH, kernel(case, inputs)[0])


def cache_written(each: Chip) -> float:
    """New keys and values land where the plain scatter puts them, beside the trash page."""
    rng, size = np.random.default_rng(0), 32
    shape = pages_shape(64, size, 8, 128, lanes_of(each))
    pool = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    k_TKH, v_TKH = jnp.asarray(rng.standard_normal((2, 200, 8, 128)), jnp.bfloat16)
    place = rng.permutation(63 * size)[:200]
    page_T, offset_T = (jnp.asarray(a, jnp.int32) for a in (1 + place // size, place % size))
    page_T = page_T.at[:PADDING_ROWS].set(0, mode="drop")
    got = jax.jit(functools.partial(update_cache, chip=each))(pool, k_TKH, v_TKH, page_T, offset_T)
    want = write_pages(pool, k_TKH, v_TKH, page_T, offset_T)
    return same(np.asarray(got[1:]), np.asarray(want[1:]))


def checks(each: Chip, interpret: bool) -> Iterator[tuple[str, str, Callable[[], float]]]:
    """Name, implementation and function of every check, the most telling ones first."""
    names = ("gpu_triton",) if interpret else IMPLEMENTATIONS
    kernels = [Kernel(n, each, interpret) for n in names if n.startswith(each.kind)]

    def of_each(name: str, function: Callable[..., float], *arguments):
        for kernel in kernels:
            yield name, kernel.name, functools.partial(function, kernel, *arguments)

    yield from of_each("long bfloat16", named, LONG, "bfloat16")
    yield from of_each("split", split)
    for name in DRAWN:
        yield from of_each(name, drawn, name)
    yield from of_each("poison", poison)
    yield from of_each("neighbours", neighbours)
    for case in CASES:
        yield from of_each(f"{case.name} bfloat16", named, case, "bfloat16")
    for kv_dtype, q_dtype in NARROW:
        yield from of_each(f"narrow {kv_dtype}", narrow, kv_dtype, q_dtype)
    yield "cache written", "update_cache", functools.partial(cache_written, each)
    yield from of_each("large pool", large_pool)
    for dtype in ("float16", "float32"):
        for case in (*CASES[::4], LONG):
            yield from of_each(f"{case.name} {dtype}", named, case, dtype)


def report_of(name: str, impl: str, function: Callable[[], float]) -> dict:
    start, row = time.perf_counter(), {"check": name, "impl": impl}
    try:
        value = function()
        row |= {"ok": value <= 1, "excess": value if np.isfinite(value) else "infinite"}
    except Refused as refused:
        row |= {"ok": True, "refused": str(refused)}
    except Exception as error:  # whatever a compiler or a device raises is the answer
        traceback.print_exc()
        row |= {"ok": False, "failed": f"{type(error).__name__}: {error}"[:500]}
    return row | {"seconds": round(time.perf_counter() - start, 2)}


def main() -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="time for all checks; default: no limit"
    )
    parser.add_argument(
        "--interpret", action="store_true", help="on the CPU, as an H100: for tests"
    )
    args = parser.parse_args()
    each = chip("h100") if args.interpret else attached_chip()
    if each is None:
        kind = jax.devices()[0].device_kind
        raise ValueError(f"no GPU or TPU of the chip table is attached but {kind!r}")
    failed, not_run, longest_s = 0, [], 0.0
    for name, impl, function in checks(each, args.interpret):
        if args.only not in name:
            continue
        if time.perf_counter() - start + longest_s > args.seconds:
            not_run.append(f"{name} ({impl})")
            continue
        row = report_of(name, impl, function)
        print(json.dumps(row), flush=True)
        failed += not row["ok"]
        longest_s = max(longest_s, row["seconds"])
    if not_run:
        print(json.dumps({"not_run": not_run}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    run(main)
