"""A program that one test compiles serves every test of the run, in all its worker processes.

Most tests build an engine or a step of their own that differs from another's in nothing XLA sees,
and compiling is most of what they cost. The programs are kept in a directory that ends with the
run: nothing that an earlier run compiled is trusted. Counters of compilations count as without it.
"""

import os
from tempfile import TemporaryDirectory

import pytest

PROGRAMS = pytest.StashKey[TemporaryDirectory]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # of pytest-xdist: the environment came with it
        return
    directory = config.stash[PROGRAMS] = TemporaryDirectory(prefix="pallasite-programs-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = directory.name  # read when jax is imported
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"


def pytest_unconfigure(config: pytest.Config) -> None:
    if directory := config.stash.get(PROGRAMS, None):
        directory.cleanup()
