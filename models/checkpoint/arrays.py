"""A directory of named arrays on disk: complete or not there, read back bit for bit or refused.

In and out: arrays by name, of any shape and dtype. Orbax stores them; it does not notice a changed
byte, so callers keep `checksums` and ask `check_files` before they read. Arrays are read in groups,
the largest first: orbax holds several copies of what one call restores.
"""

import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

GROUP_BYTES = 64 << 20


@contextmanager
def new_directory(directory: Path, marker: str, *, overwrite: bool) -> Iterator[Path]:
    """A hidden directory to fill, which takes its name when the block ends without an error.

    An existing one is refused, or with `overwrite` replaced if it holds the file `marker`. It is
    set aside before the new one takes its name and put back if that fails.
    """
    if directory.exists() and not overwrite:
        raise ValueError(f"{directory} exists already; choose another or ask to overwrite it")
    if directory.exists() and not (directory / marker).is_file():
        raise ValueError(f"{directory} was not saved by Pallasite and will not be overwritten")
    work, aside = (directory.with_name(f".{directory.name}.{os.getpid()}{s}") for s in ("", ".old"))
    shutil.rmtree(work, ignore_errors=True)  # left by a process of the same id that was killed
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"{directory} cannot be made: {error.strerror}") from error
    try:
        yield work
        if not directory.exists():
            work.rename(directory)
            return
        shutil.rmtree(aside, ignore_errors=True)  # likewise: what stands there is newer
        directory.rename(aside)
        try:
            work.rename(directory)
        except BaseException:
            aside.rename(directory)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_arrays(directory: Path, arrays: Mapping[str, jax.Array]) -> None:
    """Arrays without elements need not be stored, and orbax cannot."""
    with _checkpointer() as checkpointer:
        stored = {name: array for name, array in arrays.items() if array.size}
        checkpointer.save(directory, args=ocp.args.PyTreeSave(stored))


def read_arrays(
    directory: Path, targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Arrays of the targets' shapes, dtypes and shardings; ValueError if others are stored."""
    leaves = {n: jnp.zeros(t.shape, t.dtype) for n, t in targets.items() if not t.size}
    stored = {name: target for name, target in targets.items() if target.size}
    try:
        with _checkpointer() as checkpointer:
            _check_stored(directory, checkpointer, stored)
            for group in _groups(stored):
                arguments = ocp.args.PyTreeRestore(
                    item=group,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(group),
                    partial_restore=True,
                )
                restored = checkpointer.restore(directory, args=arguments)
                leaves |= jax.block_until_ready(restored)
    except (ValueError, OSError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{directory} cannot be restored ({reason:.200}); save it again"
        ) from error
    return leaves


def _checkpointer() -> ocp.Checkpointer:
    # Weights hardly compress: without, saving is five times and restoring twice as fast.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _check_stored(directory: Path, checkpointer: ocp.Checkpointer, target: dict[str, Any]) -> None:
    tree = checkpointer.metadata(directory).item_metadata.tree
    stored = {name: tuple(leaf.shape) for name, leaf in tree.items()}
    declared = {name: leaf.shape for name, leaf in target.items()}
    if stored != declared:
        wrong = sorted(n for n in stored | declared if stored.get(n) != declared.get(n))
        raise ValueError(f"it does not hold what its config declares: {', '.join(wrong[:10])}")


def _groups(target: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The largest first, `GROUP_BYTES` at a time or a larger one alone."""
    group, size_bytes = {}, 0
    for name in sorted(target, key=lambda n: (-target[n].size, n)):
        leaf_bytes = target[name].size * target[name].dtype.itemsize
        if group and size_bytes + leaf_bytes > GROUP_BYTES:
            yield group
            group, size_bytes = {}, 0
        group[name] = target[name]
        size_bytes += leaf_bytes
    yield group


def checksums(directory: Path) -> dict[str, str]:
    """Length and CRC-32 of every file, by path within the directory."""
    files = [file for file in sorted(directory.rglob("*")) if file.is_file()]
    return {str(file.relative_to(directory)): _checksum(file) for file in files}


def check_files(directory: Path, expected: Mapping[str, str]) -> None:
    for name, value in expected.items():
        file = directory / name
        if not file.is_file():
            raise ValueError(f"{file} is missing; save it again")
        if _checksum(file) != value:
            raise ValueError(f"{file} was changed or cut off since it was saved; save it again")


def _checksum(file: Path) -> str:
    value, size_bytes = 0, 0
    with file.open("rb") as data:
        while chunk := data.read(1 << 22):
            value, size_bytes = zlib.crc32(chunk, value), size_bytes + len(chunk)
    return f"{size_bytes}-{value:08x}"
