"""XLA's options for programs of tests that are compiled often and run briefly.

Without LLVM's optimizations a program compiles in a half to two thirds of the time. Integers come
out the same, and floats within the tolerance that a test allows another order of sums.
"""

import pytest

from engine import engine_args
from engine.engine import Engine

QUICK = {"xla_backend_optimization_level": 0}


@pytest.fixture(autouse=True)
def quick_engines(request, monkeypatch) -> None:
    """For engines that `LLM` and scripts make in this process, but not of a whole real model."""
    if request.node.get_closest_marker("real_model") is None:
        use_quick_engines(monkeypatch)


def use_quick_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(*arguments, compiler_options, **options) -> Engine:
        return Engine(*arguments, compiler_options=compiler_options | QUICK, **options)

    monkeypatch.setattr(engine_args, "Engine", engine)
