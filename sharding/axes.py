"""From logical axes to mesh axes.

A parameter says what its axes are (`heads`, `mlp`, ...), rules say which mesh axis splits each, and
the result is a `PartitionSpec`. Nothing is split wrongly in silence: a mesh axis used twice in one
array, or a size that does not divide, is an error that names the axis and both numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Rules = Mapping[str, str]

# Megatron-style tensor parallelism (Shoeybi et al. 2019): heads and MLP columns are split, so that
# attention and MLP each end in one all-reduce; the vocabulary is split for the head's matmul.
TENSOR_PARALLEL: Rules = {
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}


def partition_spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh, rules: Rules
) -> PartitionSpec:
    """The spec of an array whose axis i is the logical axis `axes[i]` (None: never split)."""
    entries: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        mesh_axis = rules.get(axis) if axis is not None else None
        if mesh_axis is not None:
            if mesh_axis not in mesh.shape:
                raise ValueError(
                    f"rule {axis} -> {mesh_axis}: the mesh has only {', '.join(mesh.shape)}"
                )
            if mesh_axis in entries:
                raise ValueError(
                    f"axes {tuple(axes)}: mesh axis {mesh_axis} would split two of them; "
                    "change the rules"
                )
            if size % mesh.shape[mesh_axis]:
                raise ValueError(
                    f"axis {axis} of size {size} does not divide over {mesh.shape[mesh_axis]} "
                    f"devices of mesh axis {mesh_axis}; use a divisor of {size}"
                )
        entries.append(mesh_axis)
    return PartitionSpec(*entries)


def named_sharding(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh, rules: Rules
) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(axes, shape, mesh, rules))


@dataclass(frozen=True)
class HeadSplit:
    """Attention on the devices of a mesh, whose `axis` splits the heads; None: all have all heads.

    Compilers do not partition kernels, and copy what they would have to: what works on heads is
    written for one device's share and runs once per device.
    """

    mesh: Mesh
    axis: str | None

    @property
    def parts(self) -> int:
        return self.mesh.shape[self.axis] if self.axis else 1

    def per_device(
        self, fn: Callable, head_axes: Sequence[int | None], out_head_axes: Sequence[int | None]
    ) -> Callable:
        """`fn` on each device's heads. `head_axes` tells for each argument which of its axes counts
        heads; None: every device has all of it."""

        def spec(head_axis: int | None) -> PartitionSpec:
            if head_axis is None or self.axis is None:
                return PartitionSpec()
            return PartitionSpec(*(None,) * head_axis, self.axis)

        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=tuple(map(spec, head_axes)),
            out_specs=tuple(map(spec, out_head_axes)),
            check_vma=False,
        )
