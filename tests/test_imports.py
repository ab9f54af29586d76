"""Imports go one way: kernels <- sharding <- models <- engine <- scripts."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ["pallas_kernels", "sharding", "models", "engine", "scripts"]
FILES = sorted(p for package in ORDER for p in (ROOT / package).rglob("*.py"))


def imported_modules(source: str) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names.append(node.module)
    return names


def upward_imports(package: str, source: str) -> list[str]:
    above = set(ORDER[ORDER.index(package) + 1 :])
    if package == "scripts":
        above = {"scripts", "tests"}
    return [name for name in imported_modules(source) if name.split(".")[0] in above]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_upward_import(path):
    package = path.relative_to(ROOT).parts[0]
    assert upward_imports(package, path.read_text()) == []


def test_the_walk_sees_an_upward_import():
    assert len(FILES) > 20
    assert upward_imports("models", "from engine.llm import LLM") == ["engine.llm"]
    assert upward_imports("sharding", "def f():\n    import models.config") == ["models.config"]
    assert upward_imports("engine", "import models.config") == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_packages_touch_no_private_jax(path):
    assert not [name for name in imported_modules(path.read_text()) if name.startswith("jax._src")]
    assert "jax._src" not in path.read_text()
