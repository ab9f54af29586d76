"""Engines of tests compile with `QUICK`, those of whole real models excepted."""

import pytest

from engine import engine_args
from engine.engine import Engine
from tests.compiling import QUICK


@pytest.fixture(autouse=True)
def quick_engines(request, monkeypatch) -> None:
    """For what `LLM` and scripts make in this process; a test of a real model may ask for it."""
    if request.node.get_closest_marker("real_model") is None:
        use_quick_engines(monkeypatch)


def use_quick_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(*arguments, compiler_options, **options) -> Engine:
        return Engine(*arguments, compiler_options=compiler_options | QUICK, **options)

    monkeypatch.setattr(engine_args, "Engine", engine)
