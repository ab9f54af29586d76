"""Rules turn logical axes into mesh axes, and refuse what cannot be split."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from sharding.axes import TENSOR_PARALLEL, partition_spec


@pytest.fixture
def mesh():
    # A spec is only arithmetic on axis sizes: an abstract mesh needs no devices.
    return jax.sharding.AbstractMesh((4,), ("tensor",))


def test_each_axis_goes_where_the_rules_say(mesh):
    spec = partition_spec(("heads", "head_dim", "embed"), (8, 64, 512), mesh, TENSOR_PARALLEL)
    assert spec == PartitionSpec("tensor", None, None)
    assert partition_spec((None, "vocab"), (3, 8), mesh, TENSOR_PARALLEL) == PartitionSpec(
        None, "tensor"
    )


def test_b81_a_size_that_does_not_divide_is_refused(mesh):
    with pytest.raises(ValueError, match="axis kv_heads of size 6 does not divide over 4 devices"):
        partition_spec(("kv_heads", None), (6, 8), mesh, TENSOR_PARALLEL)


def test_one_mesh_axis_cannot_split_two_axes(mesh):
    with pytest.raises(ValueError, match="mesh axis tensor would split two of them"):
        partition_spec(("heads", "mlp"), (8, 8), mesh, TENSOR_PARALLEL)


def test_an_unknown_mesh_axis_is_refused():
    one = Mesh(np.array(jax.devices()[:1]), ("data",))
    with pytest.raises(ValueError, match="the mesh has only data"):
        partition_spec(("heads",), (8,), one, TENSOR_PARALLEL)
