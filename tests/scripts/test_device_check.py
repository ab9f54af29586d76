"""scripts/device_check.sh: rehearsed at toy size on the CPU, and with parts that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import device_check as check  # noqa: E402
from device_report import markdown  # noqa: E402

FACTS = {
    "device": "NVIDIA H200",
    "date": "2026-01-31",
    "jax": "0.12",
    "python": "3.12",
    "commit": "a1",
}


def script(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHON": sys.executable}
    command = ["bash", "scripts/device_check.sh", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def test_without_an_accelerator_it_says_so_in_one_line():
    result = script()
    assert result.returncode == 2
    assert result.stderr.strip() == (
        "error: no accelerator of the chip table (pallas_kernels/chips.py) is attached: "
        "jax sees 'cpu'"
    )
    assert result.stdout == ""


def test_a_rehearsal_runs_every_part_and_writes_both_reports(tmp_path):
    result = script("--rehearse", "--output", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    (page,), (found,) = tmp_path.glob("*.md"), tmp_path.glob("*.json")
    report = json.loads(found.read_text())
    assert report["label"] == "rehearsed"
    kernels, attention, decode = (part["rows"] for part in report["parts"])
    assert [row["check"] for row in kernels] == ["phi_3_mini_decode bfloat16"]
    assert kernels[0]["excess"] <= 1
    assert list(attention[1]["kernels"]) == ["gpu_triton"]
    assert [row["batch"] for row in decode[1:]] == [2]
    assert all(f"## {part['name']}" in page.read_text() for part in report["parts"])


def part_of(program: str, name: str = "attention") -> check.Part:
    return check.Part(name, 60, ("-c", program), (), ())


def test_a_part_that_runs_out_of_time_keeps_the_rows_it_had():
    program = """
import time
print('{"case": "first"}', flush=True)
print('{"case": "cut', end="", flush=True)
time.sleep(60)
"""
    part = check.run_part(part_of(program), "gpu", 2, rehearse=False)
    assert not part["ok"]
    assert part["reason"] == "stopped after 2 s; what it had found by then is here"
    assert part["rows"] == [{"case": "first"}]


def test_a_part_that_fails_says_why_and_the_others_go_on(tmp_path, monkeypatch):
    parts = (
        part_of("import no_such_module"),
        part_of("""print('{"check": "c", "impl": "i", "ok": false}'); exit(1)""", "kernels"),
        part_of("print(1)", "decode"),
    )
    monkeypatch.setattr(check, "PARTS", parts)
    monkeypatch.setattr(check, "machine", lambda: FACTS)
    monkeypatch.setattr(sys, "argv", ["device_check.py", "--output", str(tmp_path)])
    assert check.main() == 1
    report = json.loads((tmp_path / "device_h200_2026-01-31.json").read_text())
    assert [part["ok"] for part in report["parts"]] == [False, False, True]
    first, second, _ = (part["reason"] for part in report["parts"])
    assert first == "exit code 1: ModuleNotFoundError: No module named 'no_such_module'"
    assert second == "1 checks failed"
    assert "no_such_module" in (tmp_path / "device_h200_2026-01-31.md").read_text()


def test_a_part_that_dies_without_a_word_is_told_by_its_exit_code(monkeypatch):
    part = check.run_part(part_of("import os; os._exit(3)"), "gpu", 60, rehearse=False)
    assert not part["ok"]
    assert part["reason"] == "exit code 3: it printed nothing"
    monkeypatch.setattr(check, "call", lambda *_: (-6, "", ""))
    with pytest.raises(OSError, match="finds no device: exit code -6: it printed nothing"):
        check.machine()


def test_a_part_is_told_its_time_and_may_leave_things_out():
    program = """
import json, sys
print(json.dumps({"not_run": sys.argv[1:]}))
"""
    part = check.Part("kernels", 60, ("-c", program), ("{kind}", "{seconds:g}"), ())
    part = check.run_part(part, "gpu", 60, rehearse=False)
    assert part["ok"]
    assert part["rows"] == [{"not_run": ["gpu", "40"]}]
    assert part["reason"] == "2 not run for lack of time"


def test_limits_are_of_known_parts_in_seconds():
    assert check.limits_of(["decode=2.5"])["decode"] == 2.5
    assert sum(check.limits_of([]).values()) + check.FACTS_LIMIT_S <= 540
    for wrong in ("decode", "decode=soon", "weights=3"):
        with pytest.raises(ValueError, match="must be PART=SECONDS"):
            check.limits_of([wrong])


def figures(median_us: float) -> dict:
    shares = {"share_of_bound": 0.9, "share_of_peak": 0.9, "share_of_copy": 0.97}
    return {"median_us": median_us, "gb_per_s": 4300.0} | shares


def test_the_page_shows_what_there_is():
    checks = [
        {"check": "long", "impl": "gpu_triton", "ok": True, "excess": 0.25},
        {"check": "large", "impl": "gpu_triton", "ok": True, "refused": "too many values"},
        {"check": "poison", "impl": "gpu_triton", "ok": False, "excess": "infinite"},
        {"not_run": ["split gpu_triton", "drawn gpu_triton"]},
    ]
    cases = [
        {"copy_gb_per_s": 4400.0},
        {
            "case": "b64",
            "kernels": {"gpu_triton": figures(100.0), "jax": figures(180.0)},
            "failed": {"cudnn": "no library"},
        },
    ]
    done = {"ok": False, "seconds": 3.0, "reason": "1 checks failed", "command": "python x"}
    parts = [
        done | {"name": "kernels", "rows": checks},
        done | {"name": "attention", "rows": cases},
        done | {"name": "decode", "rows": []},
    ]
    page = markdown(FACTS | {"label": "measured", "peak_gb_per_s": 4800.0, "parts": parts})
    assert "# NVIDIA H200, 2026-01-31, measured" in page
    assert "memory 4800 GB/s as published; copy 4400 GB/s in the same run." in page
    assert "jax 0.12, Python 3.12; commit a1; memory" in page
    assert "| gpu_triton | 1 | 1 | 1 | 0.25 |" in page
    assert "Not run for lack of time: split gpu_triton, drawn gpu_triton.\n" in page
    assert page.count("Not run") == 1
    assert "| poison | gpu_triton | infinite tolerances |" in page
    assert "| b64 | gpu_triton | 100.0 | 4300 | 90% | 90% | 97% | 1.80 |" in page
    assert "| b64 | cudnn | failed |" in page
    assert "## decode" not in page
    nowhere = FACTS | {"label": "measured", "peak_gb_per_s": None, "commit": None, "parts": []}
    assert "\njax 0.12, Python 3.12.\n" in markdown(nowhere)
