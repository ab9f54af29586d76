"""Save and restore a converted model: its config as JSON, its parameters by orbax.

    directory/pallasite.json   config, dtype, checksums of the files below
    directory/params/          orbax checkpoint of the parameters by dotted path

In and out: (ModelConfig, ModelParams). Invariant: what `restore` returns equals what `save` was
given, dtypes included; a directory is complete or it is not there, because it is written beside its
place and renamed. Parameters are restored in groups, the largest first: orbax holds several copies
of what one call restores.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from models.checkpoint.config_json import (
    MARKER,
    Saved,
    check_files,
    checksum,
    read_saved,
    write_saved,
)
from models.config import ModelConfig
from models.model import ModelParams, declare
from models.params import abstract, flatten, unflatten

PARAMS = "params"
GROUP_BYTES = 64 << 20


def save(
    directory: str | Path, config: ModelConfig, params: ModelParams, *, overwrite: bool = False
) -> None:
    """Write a new directory; an existing one is refused, or replaced with `overwrite`."""
    directory = Path(directory).absolute()
    if directory.exists() and not overwrite:
        raise ValueError(f"{directory} exists already; choose another or ask to overwrite it")
    if directory.exists() and not (directory / MARKER).is_file():
        raise ValueError(f"{directory} was not saved by Pallasite and will not be overwritten")
    dtype = str(params.embed_VD.dtype)
    _check_tree(config, dtype, params)
    work = directory.with_name(f".{directory.name}.{os.getpid()}")
    work.mkdir(parents=True)
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(work / PARAMS, args=ocp.args.PyTreeSave(flatten(params)))
        files = [file for file in sorted((work / PARAMS).rglob("*")) if file.is_file()]
        checksums = {str(file.relative_to(work)): checksum(file) for file in files}
        write_saved(work, Saved(config, dtype, checksums))
        if directory.exists():
            directory.rename(work / "replaced")
        work.rename(directory)
        shutil.rmtree(directory / "replaced", ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_tree(config: ModelConfig, dtype: str, params: ModelParams) -> None:
    expected, given = flatten(abstract(declare(config), dtype)), flatten(params)
    wrong = sorted(
        path
        for path in expected.keys() | given.keys()
        if path not in expected
        or path not in given
        or (given[path].shape, given[path].dtype) != (expected[path].shape, expected[path].dtype)
    )
    if wrong:
        raise ValueError(f"these parameters do not fit the config: {', '.join(wrong[:10])}")


def restore(
    directory: str | Path, *, dtype: Any = None, shardings: Any = None
) -> tuple[ModelConfig, ModelParams]:
    """`dtype` None keeps the saved one; `shardings` is a tree like the parameters'."""
    directory = Path(directory).absolute()
    saved = read_saved(directory)
    check_files(directory, saved)
    declaration = declare(saved.config)
    placement = {} if shardings is None else flatten(shardings)
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement.get(path, default))
        for path, leaf in flatten(abstract(declaration, dtype or saved.dtype)).items()
    }
    leaves: dict[str, jax.Array] = {}
    try:
        with _checkpointer() as checkpointer:
            _check_stored(directory, checkpointer, target)
            for group in _groups(target):
                arguments = ocp.args.PyTreeRestore(
                    item=group,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(group),
                    partial_restore=True,
                )
                restored = checkpointer.restore(directory / PARAMS, args=arguments)
                leaves |= jax.block_until_ready(restored)
    except (ValueError, OSError, KeyError, TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{directory / PARAMS} cannot be restored ({reason:.200}); save the model again"
        ) from error
    return saved.config, unflatten(declaration, leaves)


def _checkpointer() -> ocp.Checkpointer:
    # Weights hardly compress: without, saving is five times and restoring twice as fast.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _check_stored(directory: Path, checkpointer: ocp.Checkpointer, target: dict[str, Any]) -> None:
    tree = checkpointer.metadata(directory / PARAMS).item_metadata.tree
    stored = {path: tuple(leaf.shape) for path, leaf in tree.items()}
    declared = {path: leaf.shape for path, leaf in target.items()}
    if stored != declared:
        wrong = sorted(p for p in stored | declared if stored.get(p) != declared.get(p))
        raise ValueError(f"it does not hold what its config declares: {', '.join(wrong[:10])}")


def _groups(target: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The largest parameters first, `GROUP_BYTES` at a time or a larger one alone."""
    group, size_bytes = {}, 0
    for path in sorted(target, key=lambda p: (-target[p].size, p)):
        leaf_bytes = target[path].size * target[path].dtype.itemsize
        if group and size_bytes + leaf_bytes > GROUP_BYTES:
            yield group
            group, size_bytes = {}, 0
        group[path] = target[path]
        size_bytes += leaf_bytes
    yield group
