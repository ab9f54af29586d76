"""What this machine is: the only place that asks which device is attached.

Resolves `dtype="auto"`, the memory a cache may be sized from, and the persistent compilation cache.
"""

from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.chips import Chip, chip_of_device

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def resolve_dtype(name: str) -> jnp.dtype:
    """`auto`: bfloat16 on TPU and GPU and on CPUs that multiply it natively, else float32."""
    if name == "auto":
        name = "bfloat16" if _multiplies_bfloat16() else "float32"
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r}; use one of auto, {', '.join(_DTYPES)}")
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


def min_matmul_rows(dtype: jnp.dtype) -> int:
    """Rows below which a matmul gets slower: XLA's CPU backend has no fast bfloat16 matvec."""
    return 2 if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" else 1


def free_memory_bytes() -> int | None:
    """Memory one device has left: as the accelerator reports it, or the host's available RAM.

    None where neither can be told.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text(encoding="ascii").splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


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
