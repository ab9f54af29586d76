"""What this machine is: the only place that asks which device is attached.

Resolves `dtype="auto"`, the memory a cache may be sized from, and the persistent compilation cache.
"""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from engine.checks import check_one_of
from pallas_kernels.chips import Chip, chip_of_device

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def resolve_dtype(name: str) -> jnp.dtype:
    """`auto`: bfloat16 on TPU and GPU and on CPUs that multiply it natively, else float32."""
    check_one_of("dtype", name, ("auto", *_DTYPES))
    if name == "auto":
        name = "bfloat16" if _multiplies_bfloat16() else "float32"
    return jnp.dtype(_DTYPES[name])


def _multiplies_bfloat16() -> bool:
    if jax.default_backend() != "cpu":
        return True
    # Before jax 0.12 XLA's CPU backend widens bfloat16 operands and is several times slower.
    major_minor = tuple(int(part) for part in jax.__version__.split(".")[:2])
    cpuinfo = Path("/proc/cpuinfo")
    return (
        major_minor >= (0, 12)
        and cpuinfo.exists()
        and "avx512_bf16" in cpuinfo.read_text(encoding="utf-8", errors="replace")
    )


def attached_chip() -> Chip | None:
    """The attached accelerator; None on a CPU and where the chip table does not know the device,
    which then runs plain XLA operations."""
    return chip_of_device(jax.devices()[0].device_kind)


def unknown_accelerator() -> str | None:
    """What jax calls the attached device where it is no CPU and has no row in the chip table."""
    device = jax.devices()[0]
    known = device.platform == "cpu" or chip_of_device(device.device_kind)
    return None if known else device.device_kind


def min_matmul_rows(dtype: jnp.dtype) -> int:
    """Rows below which a matmul gets slower: XLA's CPU backend has no fast bfloat16 matvec."""
    return 2 if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" else 1


def free_memory_bytes() -> int | None:
    """Memory one device has left: as the accelerator reports it, or what the host still gives this
    process. None where neither can be told."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return min(_host_memory_bytes(Path("/")), default=None)


def _host_memory_bytes(root: Path) -> Iterator[int]:
    """What is left of each limit: of the host's RAM, and of every control group (container) around
    this process, version 1 or 2. File pages that the kernel would give up count as free."""
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage, cached = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        top = root / "sys/fs/cgroup" / top
        innermost = top / path.lstrip("/")
        for group in (innermost, *innermost.parents):
            if group.is_relative_to(top) and _lines(group / limit) not in ([], ["max"]):
                stat = dict(entry.split() for entry in _lines(group / "memory.stat"))
                used_bytes = int(_lines(group / usage)[0]) - int(stat.get(cached, 0))
                yield max(int(_lines(group / limit)[0]) - used_bytes, 0)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


def enable_compilation_cache(directory: Path | None = None) -> Path:
    """Keep compiled programs on disk (user cache directory), for every later process."""
    if directory is None:
        # Imported here: only what is kept needs to know where caches are.
        import platformdirs

        directory = Path(platformdirs.user_cache_dir("pallasite")) / "compiled"
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory
