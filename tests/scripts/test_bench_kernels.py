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
import kernel_cases as sizes  # noqa: E402
import kernel_runs as runs  # noqa: E402

from pallas_kernels.chips import chip  # noqa: E402
from pallas_kernels.paged_attention import ragged_paged_attention, refusals  # noqa: E402
from pallas_kernels.paged_attention.cases import CASES  # noqa: E402
from pallas_kernels.paged_attention.layout import pages_shape  # noqa: E402


def script(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/bench_kernels.py", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


def case_named(name: str):
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_without_the_chip_it_says_so_in_one_line(target):
    result = script("--target", target)
    assert result.returncode == 2
    assert result.stderr.strip() == (
        f"error: --target {target} needs a {target.upper()} of the chip table; attached is 'cpu'"
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
    llama = sizes.at_serving_size(case_named("llama_3_1_8b_decode"), 64, 4096, 512, 64)
    kv_bytes, qo_bytes = 64 * 4096 * 2 * 8 * 128 * 2, 64 * 2 * 32 * 128 * 2
    assert sizes.bytes_of(llama) == kv_bytes + qo_bytes
    assert sizes.flops_of(llama) == 64 * 4096 * 4 * 32 * 128
    v6e = chip("v6e")
    assert sizes.bound_s(llama, v6e) == pytest.approx((kv_bytes + qo_bytes) / 1638e9)
    narrow = replace(llama, kv_dtype="int8")
    assert sizes.bytes_of(narrow) == kv_bytes // 2 + qo_bytes
    # The window of a chunk of 3 tokens at 10 keys: positions 7 to 9 see 4 keys each, 6 in all.
    windowed = replace(llama, q_lens=(3,), kv_lens=(10,), window=4)
    assert sizes.keys_of(windowed) == 6
    assert sizes.flops_of(windowed) == 3 * 4 * 4 * 32 * 128
    # A long chunk is bound by the matrix units.
    chunk = sizes.at_serving_size(case_named("llama_3_1_8b_chunk"), 64, 4096, 512, 64)
    assert chunk.q_lens == (512,)
    assert sizes.bound_s(chunk, v6e) == pytest.approx(sizes.flops_of(chunk) / 918e12)


def test_the_sizes_of_gpus_are_measured_first_and_their_kernels_take_all_of_them():
    cases = sizes.serving_cases("gpu", 64, 4096, 512, 16)
    assert cases[: len(sizes.GPU_SERVING)] == sizes.GPU_SERVING
    assert len(sizes.serving_cases("tpu", 64, 4096, 512, 64)) == len(CASES)
    h200 = chip("h200")
    for case in cases:
        tables = bench.turns_of(case, bench.KINDS["gpu"], h200)
        spec = sizes.spec_of(case, h200, tables)
        table_USM, num_pages = runs.page_tables(case, tables)
        assert (spec.num_pages, spec.pages_per_slot) == (num_pages, table_USM.shape[2])
        reasons = refusals(spec, h200)
        assert reasons["gpu_triton"] is None, (case.name, reasons)


def test_keys_of_other_page_tables_are_ten_times_the_fast_memory():
    h200 = chip("h200")  # 50 MiB of cache
    counts = {
        case.name: bench.turns_of(case, bench.KINDS["gpu"], h200) for case in sizes.GPU_SERVING
    }
    assert counts["gqa_64_8_b64_4k"] == 2  # 1 GiB each
    assert counts["gqa_64_8_b1_16k"] == 8  # 64 MiB each
    assert counts["gqa_64_8_b8_16k"] == 2  # 512 MiB each


def test_ragged_lengths_are_in_no_order():
    assert sum(sizes.RAGGED) // 64 == 6055
    assert (min(sizes.RAGGED), max(sizes.RAGGED)) == (128, 32_768)
    # A sorted list has no fall or 63; of a permutation 31.5 are expected, with variance 65 / 12.
    falls = sum(a > b for a, b in zip(sizes.RAGGED, sizes.RAGGED[1:], strict=False))
    assert 25 <= falls <= 38


def test_yardsticks_take_only_what_they_can(monkeypatch):
    monkeypatch.setattr(runs, "paged_run", lambda *_: True)
    cases = {
        case.name: case
        for case in (
            *sizes.serving_cases("gpu", 2, 4096, 512, 16),
            replace(sizes.GPU_SERVING[0], name="odd", kv_lens=(4000,), q_lens=(1,)),
        )
    }
    by_gpu = [name for name, case in cases.items() if runs.jax_gpu_run(case, 2, 2)]
    by_tpu = [name for name, case in cases.items() if runs.jax_tpu_run(case, 2, 2)]
    gqa = [
        f"gqa_64_8_{name}"
        for name in (
            "b64_4k",
            "b64_8k",
            "b64_16k",
            "b64_ragged",
            "b64_4k_page_64",
            "b8_16k",
            "b1_16k",
            "b64_16k_page_64",
        )
    ]
    narrow = [f"gqa_64_8_{name}" for name in ("b64_4k_fp8", "b64_4k_int8")]
    small = ["smollm2_135m_decode", "qwen_2_5_0_5b_decode"]
    assert sorted(by_gpu) == sorted([*gqa, *narrow, "llama_3_1_8b_decode", *small])
    assert sorted(by_tpu) == sorted([*gqa, "llama_3_1_8b_decode", "odd"])


def test_jaxs_gpu_kernel_gets_no_pool_that_it_cannot_count(monkeypatch):
    """2^31 values per pool; with more it counts in 64 bits where they take over 2^32 bytes."""
    monkeypatch.setattr(runs, "paged_run", lambda *_: True)
    cases = {case.name.removeprefix("gqa_64_8_"): case for case in sizes.GPU_SERVING}
    fp8, wide = cases["b64_16k_fp8"], cases["b64_16k"]
    assert sizes.pool_pages(fp8, 2) * 16 * 8 * 128 == (1 << 31) + 16 * 8 * 128
    assert runs.jax_gpu_run(fp8, 2, 2) is None
    assert runs.jax_gpu_run(fp8, 1, 2)  # 2^30 values
    assert runs.jax_gpu_run(wide, 2, 2)  # as many values, of twice the bytes
    assert runs.jax_gpu_run(fp8, 5, 2)  # over 2^32 bytes


def test_the_timed_loop_is_attention_over_each_page_table_in_turn():
    case = sizes.at_serving_size(case_named("gpt_2_prefill"), 2, 32, 20, 16)
    case = replace(case, dtype="float32", kv_dtype="float32", q_lens=(1, 5), kv_lens=(15, 32))
    seen = []

    def attend(q_TNH, kv_pages, table_SM, *slots, **facts):
        facts.pop("chip")
        seen.append((kv_pages, slots, facts))
        return ragged_paged_attention(q_TNH, kv_pages, table_SM, *slots, **facts, impl="reference")

    pools, call = runs.our_kernel(case, chip("v6e"), attend)
    measured = runs.paged_run(case, 2, 3, pools, call)
    assert measured.calls == runs.CALLS_OF_A_STEP == 8
    q_TNH, (kv_pages,), tables, slots = measured.loop.args
    ids = np.stack(tables)
    assert (ids[:, 0, 1] == 0).all()  # the short slot's second column is not used
    assert sorted(ids[ids > 0]) == list(range(1, 1 + 2 * 3))  # every page once, tables share none
    facts = {"scale": case.scale, "max_q_len": 5, "impl": "xla"}
    plain = pages_shape(kv_pages.shape[0], 16, case.num_kv_heads, case.head_dim)
    # Two heads of 64 share a row of 128 lanes: side by side, as plain XLA wants them apart.
    P, two, R, C, L = kv_pages.shape
    apart = kv_pages.reshape(P, two, R, C, L // 64, 64).transpose(0, 1, 2, 4, 3, 5).reshape(plain)
    want_TNH = q_TNH
    for table_SM in tables * 4:
        want_TNH = ragged_paged_attention(want_TNH, apart, table_SM, *slots, **facts)
    got_TNH = measured.loop()
    assert jnp.max(jnp.abs(got_TNH - want_TNH)) <= 2e-5 * jnp.max(jnp.abs(want_TNH))
    assert seen[-1][2]["max_q_len"] == 5


def test_public_kernels_get_the_same_keys_and_the_row_tells_what_failed(monkeypatch, capsys):
    """With a kernel that raises and one that takes nothing: the others' figures stand."""

    def raises(case, turns, calls):
        raise NotImplementedError("no such device")

    monkeypatch.setattr(bench, "SLOW_CASES", ("gpt_2_prefill",))
    kind = replace(bench.KINDS["gpu"], yardsticks={"broken": raises, "picky": lambda *_: None})
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--target", "gpu", "--repeats", "1"])
    args = bench.parse_args()
    case = sizes.at_serving_size(case_named("gpt_2_prefill"), 2, 32, 20, 16)
    case = replace(case, q_lens=(1, 1), kv_lens=(15, 32))
    monkeypatch.setattr(bench, "refusals", lambda *_: {"xla": None, "gpu_triton": "no GPU"})
    row = bench.bench(case, kind, replace(chip("h100"), l2_bytes=0), 1e10, args)
    assert list(row["kernels"]) == ["xla"]
    assert row["failed"] == {"broken": "NotImplementedError: no such device"}
    assert row["refused"] == {"gpu_triton": "no GPU"}
    bench.print_table([row])
    assert "broken" in capsys.readouterr().out
    monkeypatch.setattr(bench, "SLOW_CASES", ())
    assert bench.bench(case, kind, replace(chip("h100"), l2_bytes=0), 1e10, args)["kernels"] == {}


def test_cases_that_would_end_too_late_are_named_and_not_begun(monkeypatch, capsys):
    now_s = [0.0]

    def bench_case(case, *_):
        now_s[0] += 4
        return {"case": case.name, "kernels": {}, "failed": {}}

    monkeypatch.setattr(bench, "bench", bench_case)
    monkeypatch.setattr(bench, "measure_copy_bandwidth", lambda _: 1e12)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now_s[0])
    arguments = ["--target", "gpu", "--interpret", "--only", "b64_4k", "--seconds", "9"]
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *arguments])
    bench.main()
    lines = [json.loads(x) for x in capsys.readouterr().out.splitlines() if x.startswith("{")]
    first, second, third, *left = (c.name for c in sizes.GPU_SERVING if "b64_4k" in c.name)
    assert [line["case"] for line in lines[1:3]] == [first, second]
    assert lines[3] == {"not_run": [third, *left]}
    assert lines[-1]["not_run"] == [third, *left]
    assert [row["case"] for row in lines[-1]["rows"]] == [first, second]


@pytest.mark.parametrize(("target", "kernel"), [("tpu", "tpu"), ("gpu", "gpu_triton")])
def test_an_interpreted_case_prints_its_row(target, kernel):
    result = script(
        "--target", target, "--interpret", "--only", "qwen_2_5_0_5b_decode", "--slots", "2",
        "--context", "32", "--chunk", "16", "--page-size", "16", "--repeats", "2",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    first, line, *_, last = result.stdout.splitlines()
    report = json.loads(last)
    assert report["label"] == json.loads(first)["label"] == "interpreted"
    (row,) = report["rows"]
    assert json.loads(line) == row
    assert row["bytes"] == (2 * 32 * 2 * 2 * 64 + 2 * 2 * 14 * 64) * 2
    assert row["failed"] == {}
    (figures,) = row["kernels"].values()
    assert list(row["kernels"]) == [kernel]
    assert figures["min_us"] <= figures["median_us"]
    assert figures["gb_per_s"] == pytest.approx(row["bytes"] / figures["median_us"] / 1e3)
    assert figures["share_of_bound"] == pytest.approx(row["bound_us"] / figures["median_us"])
    copied = figures["gb_per_s"] / report["copy_gb_per_s"]
    assert figures["share_of_copy"] == pytest.approx(copied)
