"""Assembling parameters from a store: steps, copies, placement, dtypes."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.checkpoint.assemble import apply_source, load_params
from models.families.family import Source
from models.params import Param


class Store:
    """Arrays in memory; remembers what was read."""

    path = Path("store")

    def __init__(self, **arrays):
        self.arrays, self.reads = arrays, []

    def names(self):
        return self.arrays.keys()

    def shape(self, name):
        return self.arrays[name].shape

    def read(self, name):
        self.reads.append(name)
        return self.arrays[name]

    def where(self, name):
        return f"store: tensor {name!r}"


def _numbers(*shape) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


DECLARATION = {"small": Param("F", (6,)), "w": Param("FD", (8, 4))}
SOURCES = {"small": Source("s"), "w": Source("big")}


def test_steps_apply_in_order():
    stored = _numbers(4, 12)  # input axis first
    source = Source("x", transpose=True, rows=(4, 12), unpermute_heads=2, add=0.5)
    got = apply_source(source, stored, Param("NHD", (2, 4, 4)), np.float32)
    rows = stored.T[4:12]
    # Pairs (0,1), (2,3) of each head hold channels (0,2), (1,3).
    expected = np.stack([rows[[0, 2, 1, 3]], rows[[4, 6, 5, 7]]]) + 0.5
    np.testing.assert_array_equal(got, expected)


def test_b83_one_is_added_in_float32_not_in_bfloat16():
    stored = np.asarray([15.8125, -18.375], jnp.bfloat16)
    got = apply_source(Source("x", add=1.0), stored, Param("H", (2,)), np.float32)
    np.testing.assert_array_equal(got, [16.8125, -17.375])


def test_each_tensor_is_read_once_the_largest_first():
    store = Store(s=_numbers(6), big=_numbers(16, 4))
    declaration = {**DECLARATION, "v": Param("FD", (8, 4))}
    sources = {
        "small": Source("s"),
        "w": Source("big", rows=(0, 8)),
        "v": Source("big", rows=(8, 16)),
    }
    params = load_params(store, declaration, sources, "float32")
    assert store.reads == ["big", "s"]
    np.testing.assert_array_equal(params["v"], _numbers(16, 4)[8:])


def test_a_part_does_not_keep_the_whole_tensor_alive():
    # Aligned to 64 bytes, jax on CPU takes a buffer over without a copy.
    buffer = np.zeros(4096 + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    whole = buffer[start : start + 4096].view(np.float32).reshape(16, 64)
    declaration = {"w": Param("FD", (8, 64)), "v": Param("FD", (8, 64))}
    sources = {"w": Source("big", rows=(0, 8)), "v": Source("big", rows=(8, 16))}
    params = load_params(Store(big=whole), declaration, sources, "float32")
    assert not any(np.shares_memory(np.asarray(leaf), whole) for leaf in params.values())


def test_leaves_land_in_their_shardings():
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x", None))
    store = Store(s=_numbers(6), big=_numbers(8, 4))
    params = load_params(
        store, DECLARATION, SOURCES, "bfloat16", shardings={"small": None, "w": sharding}
    )
    assert params["w"].sharding == sharding
    assert params["w"].dtype == params["small"].dtype == jnp.bfloat16


def test_ignored_names_need_a_pattern():
    store = Store(s=_numbers(6), big=_numbers(8, 4), mask=_numbers(2))
    with pytest.raises(ValueError, match="1 tensors belong to no parameter: mask"):
        load_params(store, DECLARATION, SOURCES, "float32", ignored=[re.compile("mas")])
    load_params(store, DECLARATION, SOURCES, "float32", ignored=[re.compile("mask")])
    assert "mask" not in store.reads


def test_rows_that_no_parameter_takes_are_refused():
    store = Store(s=_numbers(6), big=_numbers(16, 4))
    sources = {**SOURCES, "w": Source("big", rows=(0, 8))}
    with pytest.raises(ValueError, match="'big' has 16 rows, the parameters take 8"):
        load_params(store, DECLARATION, sources, "float32")


def test_nothing_is_read_before_all_is_checked():
    store = Store(s=_numbers(7), big=_numbers(8, 4))
    with pytest.raises(ValueError, match=r"'s' has shape \(7,\), small needs \(6,\)"):
        load_params(store, DECLARATION, SOURCES, "float32")
    assert store.reads == []


@pytest.mark.parametrize("dtype", ["int8", "float16", "float64", "bf16", None, 3])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="use float32 or bfloat16"):
        load_params(Store(s=_numbers(6), big=_numbers(8, 4)), DECLARATION, SOURCES, dtype)
