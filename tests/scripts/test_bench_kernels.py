"""scripts/bench_kernels.py: its arguments, what it counts, and that its loop computes attention."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import bench_kernels as bench  # noqa: E402

from pallas_kernels.chips import chip  # noqa: E402
from pallas_kernels.paged_attention import ragged_paged_attention  # noqa: E402
from pallas_kernels.paged_attention.cases import CASES  # noqa: E402


def script(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/bench_kernels.py", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


def case_named(name: str):
    return next(case for case in CASES if case.name == name)


def test_without_a_tpu_it_says_so_in_one_line():
    result = script("--target", "tpu")
    assert result.returncode == 2
    assert result.stderr.strip() == (
        "error: --target tpu needs a TPU of the chip table; attached is 'cpu'"
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"slots": 0}, "--slots must be at least 1, got 0"),
        ({"page_size": 0}, "--page-size must be at least 1, got 0"),
        ({"context": 100}, "--context 100 must hold the new tokens: at least 512"),
        ({"only": "bert"}, "--only 'bert' matches none of"),
    ],
)
def test_bad_arguments_are_refused(arguments, reason, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--target", "tpu"])
    args = bench.parse_args()
    for name, value in arguments.items():
        setattr(args, name, value)
    with pytest.raises(ValueError, match=reason):
        bench.cases_for(args, chip("v6e"))


def test_bytes_and_operations_are_those_one_counts_by_hand():
    llama = bench.at_serving_size(case_named("llama_3_1_8b_decode"), 64, 4096, 512, 64)
    kv_bytes, qo_bytes = 64 * 4096 * 2 * 8 * 128 * 2, 64 * 2 * 32 * 128 * 2
    assert bench.bytes_of(llama) == kv_bytes + qo_bytes
    assert bench.flops_of(llama) == 64 * 4096 * 4 * 32 * 128
    v6e = chip("v6e")
    assert bench.bound_s(llama, v6e) == pytest.approx((kv_bytes + qo_bytes) / 1638e9)
    # The window of a chunk of 3 tokens at 10 keys: positions 7 to 9 see 4 keys each, 6 in all.
    windowed = replace(llama, q_lens=(3,), kv_lens=(10,), window=4)
    assert bench.keys_of(windowed) == 6
    assert bench.flops_of(windowed) == 3 * 4 * 4 * 32 * 128
    # A long chunk is bound by the matrix units.
    chunk = bench.at_serving_size(case_named("llama_3_1_8b_chunk"), 64, 4096, 512, 64)
    assert chunk.q_lens == (512,)
    assert bench.bound_s(chunk, v6e) == pytest.approx(bench.flops_of(chunk) / 918e12)


def test_the_yardstick_takes_only_what_it_can():
    taken = [
        case.name
        for case in CASES
        if bench.jax_tpu_kernel(bench.at_serving_size(case, 64, 4096, 512, 64)) is not None
    ]
    assert taken == ["llama_3_1_8b_decode"]


def test_the_timed_loop_is_attention_over_each_page_table_in_turn():
    case = bench.at_serving_size(case_named("gpt_2_prefill"), 2, 32, 20, 16)
    case = replace(case, dtype="float32", q_lens=(1, 5), kv_lens=(20, 32))
    seen = []

    def attend(q_TNH, kv_pages, table_SM, *slots, **facts):
        facts.pop("chip")
        seen.append((kv_pages, slots, facts))
        return ragged_paged_attention(q_TNH, kv_pages, table_SM, *slots, **facts, impl="reference")

    pools, call = bench.our_kernel(case, chip("v6e"), attend)
    measured = bench.make_run(case, 2, 3, pools, call)
    q_TNH, (kv_pages,), table_USM, slots = measured.loop.args
    ids = np.asarray(table_USM).ravel()
    assert sorted(ids) == list(range(1, 1 + 2 * 2 * 2))  # every page once, none shared by tables
    facts = {"scale": case.scale, "max_q_len": 5, "impl": "xla"}
    plain = bench.pages_shape(kv_pages.shape[0], 16, case.num_kv_heads, case.head_dim)
    # Two heads of 64 share a row of 128 lanes: side by side, as plain XLA wants them apart.
    P, two, R, C, L = kv_pages.shape
    apart = kv_pages.reshape(P, two, R, C, L // 64, 64).transpose(0, 1, 2, 4, 3, 5).reshape(plain)
    want_TNH = q_TNH
    for u in (0, 1, 0):
        want_TNH += ragged_paged_attention(want_TNH, apart, table_USM[u], *slots, **facts)
    got_TNH = measured.loop()
    assert jnp.max(jnp.abs(got_TNH - want_TNH)) <= 2e-5 * jnp.max(jnp.abs(want_TNH))
    assert seen[-1][2]["max_q_len"] == 5


def test_an_interpreted_case_prints_its_row():
    result = script(
        "--target", "tpu", "--interpret", "--only", "qwen_2_5_0_5b_decode", "--slots", "2",
        "--context", "32", "--chunk", "16", "--page-size", "16", "--repeats", "2",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["label"] == "interpreted"
    (row,) = report["rows"]
    assert row["bytes"] == (2 * 32 * 2 * 2 * 64 + 2 * 2 * 14 * 64) * 2
    assert row["min_us"] <= row["median_us"]
    assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median_us"] / 1e3)
    assert row["share_of_bound"] == pytest.approx(row["bound_us"] / row["median_us"])
