"""A program that one test compiles serves every test of the run, in all its processes.

Most tests build an engine or a step of their own that differs from another's in nothing XLA sees,
and compiling is most of what they cost. The programs are kept in a directory that ends with the
run: nothing that an earlier run compiled is trusted. Counters of compilations count as without it.

XLA's thread pool on the CPU has at least THREADS threads: those of an interpreted Mosaic GPU kernel
each hold one while they wait for each other, and with fewer they wait for ever.
"""

import os
from tempfile import TemporaryDirectory

import jax
import pytest

THREADS = 8
PROGRAMS = pytest.StashKey[TemporaryDirectory]()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist has the variables already
        config.stash[PROGRAMS] = TemporaryDirectory(prefix="pallasite-programs-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = config.stash[PROGRAMS].name
        os.environ.setdefault("NPROC", str(max(THREADS, os.cpu_count() or 1)))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    # Child processes read the variables; here jax may have been imported before they were set.
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def pytest_unconfigure(config: pytest.Config) -> None:
    if PROGRAMS in config.stash:
        config.stash[PROGRAMS].cleanup()
