"""The scripts over records: exit status, the one line they print, and a picture."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "traces" / "smollm2.jsonl"


def call(script: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, f"scripts/{script}.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", ["replay", "draw_trace"])
def test_a_file_that_is_no_record_is_one_line_and_status_2(script, tmp_path):
    if script == "draw_trace":
        pytest.importorskip("matplotlib")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("no record\n")
    arguments = [] if script == "replay" else ["--output", tmp_path / "x.svg"]
    result = call(script, bad, *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {bad}, line 1, is no line of a record")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("picture", ["schedule", "pages"])
def test_pictures_in_the_docs_are_drawn_from_the_record(picture, tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "picture.svg"
    result = call("draw_trace", RECORD, "--output", output, "--picture", picture)
    assert result.returncode == 0, result.stderr
    assert 10_000 < output.stat().st_size < 300_000


def test_a_record_replays_and_a_changed_one_names_the_token(run_here, tiny_model, tmp_path):
    record, changed = tmp_path / "run.jsonl", tmp_path / "changed.jsonl"
    model = ["--model", tiny_model, "--dtype", "float32"]
    sampled = ["--temperature", 1, "--max-tokens", 4, "--ignore-eos", "--record", record]
    result = run_here("generate", "Hello", "b", *model, *sampled)
    assert result.returncode == 0, result.stderr
    result = run_here("replay", record, *model)
    assert result.stdout.startswith(b"identical: 8 tokens of 2 requests"), result.stderr
    assert result.returncode == 0
    result = run_here("replay", record, *model, "--record", record)
    assert result.returncode == 2
    assert b"is the record to replay; name another file" in result.stderr
    lines = record.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"emitted":[[' in line)
    head, tail = lines[at].split('"emitted":[[')
    q, uid, token, rest = tail.split(",", 3)
    lines[at] = f'{head}"emitted":[[{q},{uid},{int(token) + 1},{rest}'
    changed.write_text("".join(lines))
    result = run_here("replay", changed, *model)
    assert result.returncode == 1
    assert f"expected {int(token) + 1}, got {token}".encode() in result.stdout
    assert b"output position 0" in result.stdout
