"""The process in which `sharding.aot` compiles: reads a question, writes an answer, and ends."""

import importlib
import math
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from sharding import hlo
from sharding.aot import Compiled, Program, Refusal, Request
from sharding.kernel_reports import gpu_kernels, tpu_kernels
from sharding.targets import Target

# Pallas kernels in optimized HLO.
_KERNEL_CALL = "custom-call"


def main(question: str, answer: str, log: str) -> None:
    request: Request = pickle.loads(Path(question).read_bytes())
    try:
        mesh = _mesh(request)
        program = _build(request, mesh)
    except ValueError as error:
        result: Compiled | Refusal = Refusal(str(error))
    else:
        result = _compile(request, program, mesh, Path(log))
    Path(answer).write_bytes(pickle.dumps(result))


def _mesh(request: Request) -> Mesh:
    """All devices of the target on one axis, `tensor`."""
    target = request.target
    if target.platform == "cpu":
        devices = jax.devices()
    else:
        devices = _topology(target, request.gpu_description).devices
    if target.topology and len(devices) != target.num_devices:
        raise ValueError(
            f"target {target.name}: its topology has {len(devices)} devices, not the "
            f"{target.num_devices} that its name says"
        )
    return Mesh(np.array(devices[: target.num_devices]), ("tensor",))


def _topology(target: Target, description: str | None) -> topologies.TopologyDescription:
    if target.platform == "cuda":
        shape = "x".join(map(str, target.topology or (1, 1, 1)))
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=shape, target_config=description
        )
    # One chip is the first of the smallest slice that every generation knows.
    flat = target.chip.name in ("v5e", "v6e")
    shape = "x".join(map(str, target.topology or ((2, 2) if flat else (2, 2, 1))))
    # Two cores that are one device: libtpu's default for v4 is a device each.
    paired = target.chip.cores > target.chip.devices
    try:
        return topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{target.chip.name}:{shape}",
            **({"chip_config_name": "megacore"} if paired else {}),
        )
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"target {target.name}: no such topology ({reason})") from error


def _build(request: Request, mesh: Mesh) -> Program:
    module, _, name = request.entry.partition(":")
    program = getattr(importlib.import_module(module), name)(mesh, **request.arguments)
    if not isinstance(program, Program):
        raise TypeError(f"{request.entry} must return a Program, got {type(program).__name__}")
    return program


def _compile(request: Request, program: Program, mesh: Mesh, log: Path) -> Compiled:
    start = time.perf_counter()
    target = request.target
    parts = {name: _device_bytes(tree) for name, tree in program.parts.items()}
    about = {
        "target": target.name,
        "num_devices": mesh.size,
        "part_bytes": parts,
        "notes": program.notes,
    }
    jitted = jax.jit(
        program.fn,
        donate_argnums=program.donate_argnums,
        out_shardings=program.out_shardings,
        compiler_options=dict(program.compiler_options),
    )
    try:
        # Kernels ask the mesh, not an attached device, which chip they are lowered for.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jitted.trace(*program.args).lower(lowering_platforms=(target.platform,))
        compiled = lowered.compile()
    except Exception as error:  # whatever a compiler raises is the answer
        text = f"{type(error).__name__}: {error}"
        return Compiled(**about, compile_s=time.perf_counter() - start, error=text)
    compile_s = time.perf_counter() - start
    main = hlo.program(compiled.as_text())
    memory = compiled.memory_analysis()
    shapes = {_shape(x) for x in jax.tree.leaves(program.watched)}
    return Compiled(
        **about,
        compile_s=compile_s,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        cost=dict(compiled.cost_analysis() or {}),
        main=main,
        collectives=hlo.collectives(main),
        watched_copies=tuple(hlo.copies_of(main, shapes)),
        kernels=_kernels(request, main, log),
    )


def _device_bytes(tree: Any) -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _shape(x: jax.ShapeDtypeStruct) -> str:
    """As HLO writes the shard of one device: `bf16[8,16]`."""
    shape = x.sharding.shard_shape(x.shape)
    letters = {"bfloat16": "bf16", "bool": "pred"}
    name = letters.get(x.dtype.name) or x.dtype.name
    for long, short in (("float8_", "f8"), ("float", "f"), ("uint", "u"), ("int", "s")):
        name = name.replace(long, short) if name.startswith(long) else name
    return f"{name}[{','.join(map(str, shape))}]"


def _kernels(request: Request, main: hlo.Region, log: Path):
    if request.dump is None:
        return ()
    dump = Path(request.dump)
    if request.target.platform == "tpu":
        names = {op.name for op in main.all_ops() if op.opcode == _KERNEL_CALL}
        return tuple(tpu_kernels(dump, names))
    sys.stderr.flush()
    launches = [path.read_text("utf-8") for path in dump.glob("*thunk_sequence.txt")]
    return tuple(gpu_kernels(log.read_text("utf-8", "replace"), "\n".join(launches)))


if __name__ == "__main__":
    main(*sys.argv[1:])
