"""generate.py as a user runs it: bad input is one line on standard error and exit code 2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
GOLDENS = ROOT / "tests" / "parity" / "goldens"


def generate(*arguments: str, stdin: bytes | None = b"", **options) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "scripts/generate.py", *arguments],
        cwd=ROOT,
        env=environment,
        input=stdin,
        capture_output=True,
        timeout=300,
        **options,
    )


def assert_refused(result: subprocess.CompletedProcess, message: str) -> None:
    error = result.stderr.decode()
    assert result.returncode == 2, error
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, error
    assert message in lines[0]
    assert result.stdout == b""


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([""], b"", "prompt 0 is empty"),
        ([], b"", "prompt 0 is empty"),
        ([], b"ab\xff", "standard input is not UTF-8: byte 0xff at offset 2"),
        (["--file", "no/such/file"], b"", "no/such/file"),
        (["--lines"], b"\n \n", "every line is blank"),
        (["x", "--max-tokens", "0"], b"", "max_tokens must be at least 1, got 0"),
        (["x", "--temperature", "nan"], b"", "temperature"),
        (["x", "--dtype", "float16"], b"", "unknown dtype 'float16'"),
        (["x", "--model", "no-such-model"], b"", "no-such-model"),
        (["x", "--model", "no/such.gguf"], b"", "no/such.gguf"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, stdin, message):
    assert_refused(generate(*arguments, stdin=stdin), message)


def test_a_damaged_model_is_one_line_and_exit_code_2(tmp_path):
    for source in (GOLDENS / "smollm2").iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(generate("x", "--model", str(tmp_path)), "model.safetensors")


@pytest.mark.real_model
def test_real_model_bad_sizes_and_long_prompts():
    for arguments, message in (
        (["x", "--page-size", "0"], "page_size must be at least 1, got 0"),
        (["x", "--num-pages", str(10**12)], "do not fit"),
        (["x", "--num-pages", "3"], "the pool has 2"),
        (["word " * 9000], "exceeds max_model_len 8192"),
    ):
        assert_refused(generate(*arguments), message)


@pytest.mark.real_model
def test_real_model_json_holds_the_texts_and_nothing_else():
    result = generate("Hello", "😀", "--max-tokens", "4", "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert [r["prompt"] for r in answer["results"]] == ["Hello", "😀"]
    assert all(1 <= len(r["token_ids"]) <= 4 for r in answer["results"])
    assert answer["stats"]["output_tok_per_s"] is None  # too few steps to time
    assert answer["stats"]["ttft_s"] > 0
