"""Bad input of scripts/aot_report.py: one line, exit code 2, before any compiler starts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def report(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/aot_report.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "llama-9", "--target", "v6e"], "there is no preset 'llama-9'; known:"),
        (["--model", "qwen3-8b", "--target", "v9"], "there is no chip 'v9'; known:"),
        (["--model", "qwen3-8b", "--target", "v6e:2x"], "'2x' is no topology"),
        (
            ["--model", "gemma-3-1b", "--target", "v6e", "--context", "40000"],
            "--context must be in 1 .. 32768 (the model's limit), got 40000",
        ),
        (["--model", "qwen3-8b", "--target", "v6e", "--page-size", "0"], "--page-size must be"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, reason):
    child = report(*arguments)
    assert child.returncode == 2
    (line,) = child.stderr.strip().splitlines()
    assert reason in line
    assert child.stdout == ""
