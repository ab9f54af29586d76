"""The engine's programs over abstract arguments, to be compiled for chips that are not here.

Each function takes a mesh with the axis `tensor` and returns the `Program` that the engine would
run there: weights and cache are split by the tensor parallel rules, the engine's state is on every
device, kernels are those of the mesh's chip. Nothing is allocated, whatever the sizes.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from engine.admission import admit
from engine.commit import commit
from engine.config import EngineConfig
from engine.dispatch import Dispatch, make_inbox
from engine.engine_args import engine_config
from engine.kernel_choice import calls, kernel_chip
from engine.network import NetworkModel
from engine.sampling_rows import SamplingLimits, empty_rows
from engine.schedule import allocate, schedule
from engine.state import init_state
from engine.step import advance
from models.config import ModelConfig
from models.kv_cache import cache_shardings, init_cache
from models.model import cache_specs, declare
from models.params import abstract, shardings
from models.presets import preset
from pallas_kernels.chips import Chip, chip_of_device
from pallas_kernels.paged_attention.spec import KernelSpec
from sharding.aot import Program
from sharding.axes import TENSOR_PARALLEL, HeadSplit, Rules


def scheduling_round(mesh: Mesh, **sizes: int) -> Program:
    """Admit, schedule, allocate and commit (which publishes and retires), without a model.

    `sizes` are fields of `EngineConfig`.
    """
    config = EngineConfig(**sizes)

    def one_round(state, token_R, ok_R):
        state = admit(config, state)
        state, plan = allocate(config, state, schedule(config, state))
        return commit(config, state, plan, token_R, ok_R)

    state = jax.eval_shape(partial(init_state, config, None))
    rows = (config.max_num_seqs,)
    arguments = (
        state,
        jax.ShapeDtypeStruct(rows, jnp.int32),
        jax.ShapeDtypeStruct(rows, jnp.bool_),
    )
    return Program(one_round, _on_all(mesh, arguments), donate_argnums=(0,))


def network_step(
    mesh: Mesh,
    *,
    model: str,
    dtype: str,
    width: int,
    num_layers: int | None = None,
    attention_impl: str = "auto",
    **sizes: int,
) -> Program:
    """`advance` of a preset whose prefill pass is `width` tokens wide; `sizes` as `engine_config`.

    `num_layers` keeps only that many, for programs that compile sooner. The cache is donated and
    watched. Notes tell why the chip's attention kernels are not used, if so.
    """
    network = preset(model)
    network = replace(network, layers=network.layers[:num_layers])
    config = replace(engine_config(**sizes), token_budget=width)
    limits = SamplingLimits(vocab_size=network.vocab_size)
    rules = rules_for(network, mesh.size)
    split = HeadSplit(mesh, rules.get("kv_heads"))
    attached = chip_of_device(mesh.devices.flat[0].device_kind)
    chip, reason = kernel_chip(
        network, config, jnp.dtype(dtype), attached, attention_impl, split.parts
    )
    step_model = NetworkModel(
        network,
        limits,
        jnp.dtype(dtype),
        attention_impl,
        chip=chip,
        head_split=split if mesh.size > 1 else None,
    )
    params = _abstract_params(network, mesh, rules, dtype)
    cache = _abstract_cache(network, config, mesh, rules, dtype, chip)
    state = jax.eval_shape(
        lambda: init_state(config, jax.tree.map(jnp.asarray, empty_rows(config.num_slots, limits)))
    )
    inbox = make_inbox(config, limits, Dispatch([], [], rounds=1, budget=width))
    inbox = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), inbox)
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    cache_places = jax.tree.map(lambda x: x.sharding, cache)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return Program(
        partial(advance, config, step_model),
        (params, cache, *_on_all(mesh, (state, inbox, rounds))),
        donate_argnums=(1, 2),
        parts={"parameters": params, "cache": cache},
        watched=cache,
        out_shardings=(cache_places, everywhere, everywhere),
        compiler_options=dict(attached.compiler_options) if attached else {},
        notes=() if reason is None else (f"attention is plain XLA operations: {reason}",),
    )


def kernel_calls(
    *,
    model: str,
    dtype: str,
    width: int,
    attached: Chip | None,
    num_devices: int,
    attention_impl: str = "auto",
    **sizes: int,
) -> list[KernelSpec]:
    """The different attention calls of one device in `network_step` by the chip's own kernels; none
    where it does without them."""
    network, kv_dtype = preset(model), jnp.dtype(dtype)
    config = replace(engine_config(**sizes), token_budget=width)
    parts = num_devices if rules_for(network, num_devices).get("kv_heads") else 1
    chip, _ = kernel_chip(network, config, kv_dtype, attached, attention_impl, parts)
    return [] if chip is None else calls(network, config, (width,), kv_dtype, chip, parts)


def rules_for(network: ModelConfig, num_devices: int) -> Rules:
    """Tensor parallel rules for this model.

    An embedding whose rows do not divide stays whole, as do all heads where KV heads do not divide.
    ValueError where MLP columns do not divide.
    """
    whole = set()
    if network.vocab_size % num_devices:
        whole.add("vocab")
    if any(layer.mixer.num_kv_heads % num_devices for layer in network.layers):
        whole |= {"heads", "kv_heads"}
    return {axis: place for axis, place in TENSOR_PARALLEL.items() if axis not in whole}


def _abstract_params(network: ModelConfig, mesh: Mesh, rules: Rules, dtype: str) -> Any:
    declaration = declare(network)
    places = shardings(declaration, mesh, rules)
    return jax.tree.map(_placed, abstract(declaration, dtype), places)


def _abstract_cache(
    network: ModelConfig,
    config: EngineConfig,
    mesh: Mesh,
    rules: Rules,
    dtype: str,
    chip: Chip | None,
) -> Any:
    parts = HeadSplit(mesh, rules.get("kv_heads")).parts
    make = partial(init_cache, cache_specs(network), config.num_pages, config.page_size)
    cache = jax.eval_shape(partial(make, jnp.dtype(dtype), chip, parts))
    places = cache_shardings(cache, mesh, rules)
    return jax.tree.map(_placed, cache, places)


def _on_all(mesh: Mesh, tree: Any) -> Any:
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: _placed(x, everywhere), tree)


def _placed(x: jax.ShapeDtypeStruct, place: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
