"""Compile a program for chips that are not here, and say what the compiler made of it.

`compile_for(entry, arguments, target)` names a function as "module:function". A child process calls
it with a mesh of the target's devices and the keyword arguments; it returns a `Program`, which the
child compiles with the target's real compiler over abstract arguments, so nothing is allocated. One
child per compilation: libtpu serves one kind of chip per process, and kernels compiled once for one
GPU would be found again, wrongly, for another.

Every number of a `Compiled` is the compiler's, for one device: nothing here was run or measured.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sharding.hlo import Op, Region
from sharding.kernel_reports import GpuKernel, TpuKernel
from sharding.targets import Target, gpu_description, missing_compiler, parse_target


@dataclass(frozen=True)
class Program:
    """What an entry function returns: `args` are abstract arrays with shardings on the mesh it was
    given. `parts` names pytrees among them whose bytes are told apart; copies of arrays as large
    as those in `watched` are reported. `compiler_options` are XLA's. `notes` are passed on."""

    fn: Callable
    args: tuple[Any, ...]
    donate_argnums: tuple[int, ...] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)
    watched: Any = ()
    out_shardings: Any = None
    compiler_options: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """One compiled program. Bytes are per device; `peak_bytes` is what it needs at once.

    part_bytes      of each of the program's parts
    error           the compiler's own words if it refused, and then the rest is empty
    alias_bytes     of the outputs that take a donated argument's place
    cost            the compiler's cost analysis; a Pallas kernel counts only what it declares
    main            the device operations of the main path, loops and branches below it
    watched_copies  copies and transposes of whole watched arrays
    kernels         of Pallas kernels (on GPUs of all), where asked for
    """

    target: str
    num_devices: int
    compile_s: float
    part_bytes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    error: str | None = None
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    code_bytes: int = 0
    cost: Mapping[str, float] = field(default_factory=dict)
    main: Region | None = None
    collectives: Mapping[str, int] = field(default_factory=dict)
    watched_copies: tuple[Op, ...] = ()
    kernels: tuple[TpuKernel | GpuKernel, ...] = ()

    @property
    def peak_bytes(self) -> int:
        live = self.argument_bytes + self.output_bytes - self.alias_bytes
        return live + self.temp_bytes + self.code_bytes


@dataclass(frozen=True)
class Request:
    """What the child is told. `dump` is a directory for the compiler's dump, or None."""

    entry: str
    arguments: Mapping[str, Any]
    target: Target
    gpu_description: str | None
    dump: str | None


@dataclass(frozen=True)
class Refusal:
    """The child's answer where the question was wrong rather than the program."""

    reason: str


def compile_for(
    entry: str,
    arguments: Mapping[str, Any],
    target: str,
    *,
    kernels: bool = False,
    timeout_s: float = 1800,
) -> Compiled:
    """The program that `entry` builds, compiled for `target` (see `sharding.targets`).

    `kernels` adds bundle counts or reports of registers and shared memory; libtpu's dump of a large
    program takes long and hundreds of megabytes while it lasts. ValueError: unknown target,
    compiler not installed, no such topology, or the entry refused its arguments. OSError: the child
    died or took too long.
    """
    resolved = parse_target(target)
    if missing := missing_compiler(resolved):
        raise ValueError(missing)
    is_gpu = resolved.platform == "cuda"
    with tempfile.TemporaryDirectory(prefix="pallasite-aot-") as scratch:
        question, answer, log = (Path(scratch) / name for name in ("question", "answer", "log"))
        dump = Path(scratch) / "dump"
        dump.mkdir()
        request = Request(
            entry=entry,
            arguments=dict(arguments),
            target=resolved,
            gpu_description=gpu_description(resolved.chip.name) if is_gpu else None,
            dump=str(dump) if kernels and resolved.chip else None,
        )
        question.write_bytes(pickle.dumps(request))
        command = [sys.executable, "-m", "sharding.aot_child", str(question), str(answer), str(log)]
        with log.open("wb") as output:
            try:
                child = subprocess.run(
                    command,
                    env=_environment(request),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise TimeoutError(
                    f"compiling for {target} took more than {timeout_s} s; allow more time"
                ) from None
        if not answer.exists():
            tail = log.read_text("utf-8", "replace")[-2000:]
            raise ChildProcessError(
                f"the compiler for {target} ended with exit code {child.returncode}:\n{tail}"
            )
        result = pickle.loads(answer.read_bytes())  # written by our own child
    if isinstance(result, Refusal):
        raise ValueError(result.reason)
    return result


def _environment(request: Request) -> dict[str, str]:
    """The child sees our import path, the host's CPU as its only device, and no user settings that
    would change what is compiled."""
    ours = (
        "XLA_FLAGS",
        "LIBTPU_INIT_ARGS",
        "JAX_COMPILATION_CACHE_DIR",
        "TF_CPP_MIN_LOG_LEVEL",
        "TF_CPP_VMODULE",
    )
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    target = request.target
    if target.platform == "cpu":
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={target.num_devices}"
    elif target.platform == "tpu":
        # No machine to ask: not the metadata server, not other processes that hold a chip.
        environment |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
        }
        if request.dump:
            environment["LIBTPU_INIT_ARGS"] = (
                f"--xla_jf_dump_to={request.dump} --xla_jf_dump_llo_text=true"
            )
    else:
        environment["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        if request.dump:  # ptxas reports, through XLA's log and Mosaic's own switch
            environment |= {
                "XLA_FLAGS": f"--xla_gpu_ptx_compiler_extra_flags=-v --xla_dump_to={request.dump}",
                "TF_CPP_MIN_LOG_LEVEL": "0",
                "TF_CPP_VMODULE": "subprocess_compilation=3",
                "MOSAIC_GPU_DUMP_PTXAS": "1",
            }
    return environment
