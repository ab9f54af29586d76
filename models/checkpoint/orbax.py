"""Save and restore a converted model: its config as JSON, its parameters by orbax.

    directory/pallasite.json   config, dtype, checksums of the files below
    directory/params/          orbax checkpoint of the parameters by dotted path

In and out: (ModelConfig, ModelParams). Invariant: what `restore` returns equals what `save` was
given, dtypes included; a directory is complete or it is not there, because it is written beside its
place and renamed.
"""

from pathlib import Path
from typing import Any

import jax

from models.checkpoint.arrays import (
    check_files,
    checksums,
    new_directory,
    read_arrays,
    write_arrays,
)
from models.checkpoint.config_json import MARKER, Saved, read_saved, write_saved
from models.config import ModelConfig
from models.model import ModelParams, declare
from models.params import abstract, flatten, unflatten

PARAMS = "params"


def save(
    directory: str | Path, config: ModelConfig, params: ModelParams, *, overwrite: bool = False
) -> None:
    """Write a new directory; an existing one is refused, or replaced with `overwrite`."""
    dtype = str(params.embed_VD.dtype)
    with new_directory(Path(directory).absolute(), MARKER, overwrite=overwrite) as work:
        _check_tree(config, dtype, params)
        write_arrays(work / PARAMS, flatten(params))
        write_saved(work, Saved(config, dtype, checksums(work)))


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
    check_files(directory, saved.checksums)
    declaration = declare(saved.config)
    placement = {} if shardings is None else flatten(shardings)
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement.get(path, default))
        for path, leaf in flatten(abstract(declaration, dtype or saved.dtype)).items()
    }
    return saved.config, unflatten(declaration, read_arrays(directory / PARAMS, target))
