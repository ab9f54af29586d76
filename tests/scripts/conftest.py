"""Scripts without a process of their own: starting Python and jax takes seconds each time."""

import io
import json
import runpy
import shutil
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from engine import cli
from tests.quick_engines import quick_engines
from tests.tiny import write_tokenizer

__all__ = ["quick_engines"]
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
def no_weights(monkeypatch) -> None:
    """A test that asks for it fails where weights are read."""

    def read_weights(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr(cli, "load_model", read_weights)


@pytest.fixture
def tiny_model(tmp_path) -> Path:
    """A model directory: random weights as transformers writes them, a token per character."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(ROOT / "tests" / "parity" / "goldens" / "smollm2" / name, directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture
def unsound_model(tiny_model) -> Path:
    """The same, but the last norm's scale is NaN."""
    path = tiny_model / "model.safetensors"
    content = bytearray(path.read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    place = json.loads(content[8:header_end])["model.norm.weight"]["data_offsets"]
    start, end = (header_end + offset for offset in place)
    content[start:end] = b"\xc0\x7f" * ((end - start) // 2)  # in bfloat16
    path.write_bytes(content)
    return tiny_model
