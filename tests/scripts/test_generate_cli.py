"""generate.py as a user runs it: bad input is one line on standard error and exit code 2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def generate(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess:
    """In a process of its own."""
    return subprocess.run(
        [sys.executable, "scripts/generate.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        input=stdin,
        capture_output=True,
        timeout=300,
    )


def assert_refused(result: subprocess.CompletedProcess, message: str) -> None:
    error = result.stderr.decode()
    assert result.returncode == 2, error
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, error
    assert message in lines[0]
    assert result.stdout == b""


def test_a_process_ends_with_one_line_and_exit_code_2():
    result = generate(stdin=b"ab\xff")
    assert_refused(result, "standard input is not UTF-8: byte 0xff at offset 2")


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([""], b"", "prompt 1 is empty"),
        ([], b"", "prompt 1 is empty"),
        (["--file", "no/such/file"], b"", "no/such/file"),
        (["--lines"], b"\n \n", "every line is blank"),
        (["hi", "--lines"], b"", "--lines is for files and standard input"),
        (["x", "--max-tokens", "0"], b"", "max_tokens must be at least 1, got 0"),
        (["x", "--temperature", "nan"], b"", "temperature"),
        (["x", "--dtype", "float16"], b"", "unknown dtype 'float16'"),
        (["x", "--model", "no-such-model"], b"", "no-such-model"),
        (["x", "--model", "no/such.gguf"], b"", "no/such.gguf"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_exit_code_2(run_here, arguments, stdin, message):
    assert_refused(run_here("generate", *arguments, stdin=stdin), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", 0], "page_size must be at least 1, got 0"),
        (["--num-pages", 10**12], "do not fit"),
        (["--num-pages", 2, "--page-size", 4], "need 17 pages of 4, the pool has 1"),
        (["--record", "no/such/run.jsonl"], "record no/such/run.jsonl cannot be written"),
        (["--seed", -1], "seed must be in 0 .. 18446744073709551615, got -1; any of these will do"),
        (["x" * 131072], "prompt 2: the prompt has 131072 tokens; with one to generate that"),
    ],
    ids=lambda x: f"{x!s:.30}",
)
def test_sizes_and_prompts_are_refused_before_weights_are_read(
    run_here, tiny_model, no_weights, arguments, message
):
    assert_refused(run_here("generate", "abcd", *arguments, "--model", tiny_model), message)


def test_a_request_that_fails_says_why(run_here, unsound_model):
    arguments = ["a", "b", "--model", unsound_model, "--dtype", "float32", "--max-tokens", 4]
    result = run_here("generate", *arguments, "--json")
    assert result.returncode == 1
    for found in json.loads(result.stdout)["results"]:
        assert found["finish_reason"] == "error"
        assert found["error"].startswith("the network gave NaN or infinity")
    lines = result.stderr.decode().splitlines()[-2:]
    for i, line in enumerate(lines, start=1):
        assert line.startswith(f"error: prompt {i}: the network gave NaN or infinity")


def test_a_damaged_model_is_one_line_and_exit_code_2(run_here, tiny_model):
    weights = tiny_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(run_here("generate", "x", "--model", tiny_model), "model.safetensors")


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--page-size", "0"], "page_size must be at least 1, got 0"),
        (["x", "--num-pages", str(10**12)], "do not fit"),
        (["x", "--num-pages", "3"], "the pool has 2"),
        (["word " * 9000], "exceeds max_model_len 8192"),
    ],
    ids=lambda value: f"{value!s:.20}",
)
def test_real_model_bad_sizes_and_long_prompts(run_here, arguments, message):
    assert_refused(run_here("generate", *arguments), message)


@pytest.mark.real_model
def test_real_model_json_holds_the_texts_and_nothing_else():
    result = generate("Hello 😀", "--chat", "--max-tokens", "4", "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert [r["prompt"] for r in answer["results"]] == ["Hello 😀"]
    assert 1 <= len(answer["results"][0]["token_ids"]) <= 4
    assert answer["stats"]["output_tok_per_s"] is None  # too few steps to time
    assert answer["stats"]["ttft_s"] > 0


def test_two_prompts_are_two_results_in_order(run_here, tiny_model):
    settings = ["--dtype", "float32", "--max-tokens", 4, "--ignore-eos", "--json"]
    result = run_here("generate", "Hello", "b", "--model", tiny_model, *settings)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert [r["prompt"] for r in answer["results"]] == ["Hello", "b"]
    assert [len(r["token_ids"]) for r in answer["results"]] == [4, 4]
