"""Scripts without a process of their own: starting Python and jax takes seconds each time."""

import io
import runpy
import shutil
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from engine import cli
from tests.tiny import write_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_here(monkeypatch, capfdbinary):
    """Call a script as a shell does, but leave the cache of compiled programs where it is."""
    monkeypatch.setattr(cli, "enable_compilation_cache", lambda: None)

    def call(script: str, *arguments: object, stdin: bytes = b"") -> CompletedProcess:
        path = ROOT / "scripts" / f"{script}.py"
        command = [str(path), *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = 0
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        return CompletedProcess(command, code, *capfdbinary.readouterr())

    return call


@pytest.fixture
def tiny_model(tmp_path) -> Path:
    """A model directory: random weights as transformers writes them, a token per character."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(ROOT / "tests" / "parity" / "goldens" / "smollm2" / name, directory)
    write_tokenizer(directory)
    return directory
