"""Names of what a program is compiled for: `cpu`, `cpu:4`, `v6e`, `v6e:2x2`, `h100`, `h100:1x1x8`.

A name alone is one chip. A TPU topology is the slice's shape in chips; a GPU topology is
slices x hosts x GPUs per host. Nothing here needs jax or a device.
"""

import math
import re
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec

from pallas_kernels.chips import Chip, chip

# Cloud TPU shapes have two axes on the e generations and three on the others.
_TPU_AXES = {"v5e": 2, "v6e": 2}


@dataclass(frozen=True)
class Target:
    """`chip` is None for the host CPU; `topology` is empty where one chip was asked for."""

    name: str
    chip: Chip | None
    topology: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """JAX devices: a chip may be several."""
        return math.prod(self.topology) * (self.chip.devices if self.chip else 1)

    @property
    def platform(self) -> str:
        return {"tpu": "tpu", "gpu": "cuda"}[self.chip.kind] if self.chip else "cpu"


def parse_target(name: str) -> Target:
    """The target of this name; ValueError says what is wrong with it."""
    chip_name, colon, shape = name.partition(":")
    if colon and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise ValueError(f"target {name!r}: {shape!r} is no topology; write it as 2x2 or 1x1x8")
    topology = tuple(map(int, shape.split("x"))) if colon else ()
    if chip_name == "cpu":
        if len(topology) > 1:
            raise ValueError(f"target {name!r}: the CPU has no topology but a count, as in cpu:4")
        return Target(name, None, topology)
    kind = chip(chip_name)
    axes = 3 if kind.kind == "gpu" else _TPU_AXES.get(chip_name, 3)
    if topology and len(topology) != axes:
        example = {2: "2x2", 3: "1x1x8" if kind.kind == "gpu" else "2x2x1"}[axes]
        raise ValueError(
            f"target {name!r}: {chip_name} has topologies of {axes} axes, as {chip_name}:{example}"
        )
    return Target(name, kind, topology)


def gpu_description(chip_name: str) -> str:
    """XLA's description of a GPU, from the texts beside this file."""
    return (resources.files("sharding") / "targets" / f"{chip_name}.txt").read_text("utf-8")


def missing_compiler(target: Target) -> str | None:
    """What must be installed to compile for the target, or None."""
    needs = {
        "cpu": (),
        "tpu": ("libtpu",),
        "cuda": ("jax_plugins.xla_cuda12", "jax_cuda12_plugin", "nvidia.cuda_nvcc"),
    }[target.platform]
    absent = [module for module in needs if not _installed(module)]
    if not absent:
        return None
    return (
        f"compiling for {target.name} needs {', '.join(absent)}, not installed here; "
        "run: pip install -e '.[aot]'"
    )


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is absent
        return False
