"""docs/known-failures.md names exactly the rows and files that the tests cover."""

import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent


def covered() -> dict[int, set[str]]:
    files = defaultdict(set)
    for path in TESTS.rglob("*.py"):
        for name in re.findall(r"def (test_b\d+\w*)", path.read_text()):
            for row in re.findall(r"(?<=_)b(\d+)(?=_)", name):
                files[int(row)].add(str(path.relative_to(TESTS)))
    return files


def test_the_table_is_true():
    text = (TESTS.parent / "docs" / "known-failures.md").read_text()
    table = {
        int(row): set(re.findall(r"`([^`]+)`", files))
        for row, files in re.findall(r"^\| B(\d+) \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    }
    assert len(table) > 50
    assert table == covered()
