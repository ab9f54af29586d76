"""The network: declare its parameters, run one ragged forward pass, read logits.

`forward` maps (tokens of a `RaggedBatch`, cache) to (hidden states, cache). Rows are independent
but for what attention reads through the page table, so any mix of prefill chunks and decode rows is
one call. Layers are unrolled, not scanned: a scan would slice stacked weights, and XLA's CPU
backend copies each slice before it multiplies.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from models.batch import RaggedBatch
from models.config import LayerSpec, ModelConfig, NormSpec
from models.contract import contract
from models.kv_cache import KVCache, PagedKVSpec, StepIndex, step_index
from models.mixers import mixer_of
from models.mlp import MlpParams, apply_mlp, declare_mlp
from models.norms import NormParams, apply_norm, declare_norm
from models.params import Param
from pallas_kernels.chips import Chip
from sharding.axes import HeadSplit


@struct.dataclass
class LayerParams:
    """Norms that the layer's placement does not use are None."""

    mixer: object
    mlp: MlpParams
    mixer_norm: NormParams | None = None
    mixer_post_norm: NormParams | None = None
    mlp_norm: NormParams | None = None
    mlp_post_norm: NormParams | None = None


@struct.dataclass
class ModelParams:
    embed_VD: jax.Array | Param
    layers: tuple[LayerParams, ...]
    final_norm: NormParams
    positions_ED: jax.Array | Param | None = None
    unembed_VD: jax.Array | Param | None = None
    unembed_bias_V: jax.Array | Param | None = None


def declare(config: ModelConfig) -> ModelParams:
    """The parameter tree with a `Param` in each leaf."""
    V, D = config.vocab_size, config.width
    return ModelParams(
        embed_VD=Param("VD", (V, D)),
        layers=tuple(_declare_layer(config, layer) for layer in config.layers),
        final_norm=declare_norm(config.norm, "D", (D,)),
        positions_ED=Param("ED", (config.max_position, D)) if config.learned_positions else None,
        unembed_VD=None if config.tied_embeddings else Param("VD", (V, D)),
        unembed_bias_V=Param("V", (V,), "zeros") if config.unembed_bias else None,
    )


def _declare_layer(config: ModelConfig, layer: LayerSpec) -> LayerParams:
    D = config.width

    def norm_if(*placements: str) -> NormParams | None:
        return declare_norm(config.norm, "D", (D,)) if layer.norms in placements else None

    return LayerParams(
        mixer=mixer_of(layer.mixer).declare(layer.mixer, config.norm, D),
        mlp=declare_mlp(layer.mlp, D),
        mixer_norm=norm_if("pre", "sandwich"),
        mixer_post_norm=norm_if("post", "sandwich"),
        mlp_norm=norm_if("pre", "sandwich"),
        mlp_post_norm=norm_if("post", "sandwich"),
    )


def cache_specs(config: ModelConfig) -> tuple[PagedKVSpec, ...]:
    """What each layer keeps per token, as its mixer declares it."""
    return tuple(mixer_of(layer.mixer).cache(layer.mixer) for layer in config.layers)


def forward(
    config: ModelConfig,
    params: ModelParams,
    cache: KVCache,
    batch: RaggedBatch,
    *,
    attention_impl: str = "auto",
    chip: Chip | None = None,
    head_split: HeadSplit | None = None,
) -> tuple[jax.Array, KVCache]:
    """Hidden states after the final norm, [T, D] in the weights' dtype, and the grown cache.

    `chip` is what the pass is compiled for and the cache is laid out for; None: the host's CPU.
    `head_split` is how attention runs on several devices; None: on one.
    Rows of padding hold finite values that mean nothing.
    """
    step = step_index(config, cache, batch, attention_impl, chip, head_split)
    x_TD = params.embed_VD.at[batch.tokens_T].get(mode="clip")
    if config.embedding_scale is not None:
        # The reference rounds the factor to the activations' dtype before it multiplies.
        x_TD = x_TD * jnp.asarray(config.embedding_scale, x_TD.dtype)
    if params.positions_ED is not None:
        x_TD = x_TD + params.positions_ED.at[batch.positions_T].get(mode="clip")
    layers = []
    for spec, layer, layer_cache in zip(config.layers, params.layers, cache.layers, strict=True):
        x_TD, layer_cache = _apply_layer(config.norm, spec, layer, layer_cache, x_TD, step)
        layers.append(layer_cache)
    hidden_TD = apply_norm(config.norm, params.final_norm, x_TD)
    return hidden_TD, cache.replace(layers=tuple(layers))


@partial(jax.jit, static_argnums=(0, 1))
def _apply_layer(
    norm_spec: NormSpec,
    spec: LayerSpec,
    params: LayerParams,
    cache: jax.Array,
    x_TD: jax.Array,
    step: StepIndex,
) -> tuple[jax.Array, jax.Array]:
    """One block. Compiled as a function of its own, so that equal layers are traced once."""

    def norm(p: NormParams | None, y_TD: jax.Array) -> jax.Array:
        return y_TD if p is None else apply_norm(norm_spec, p, y_TD)

    mixed_TD, cache = mixer_of(spec.mixer).apply(
        spec.mixer, norm_spec, params.mixer, cache, norm(params.mixer_norm, x_TD), step
    )
    x_TD = x_TD + norm(params.mixer_post_norm, mixed_TD)
    fed_TD = apply_mlp(spec.mlp, params.mlp, norm(params.mlp_norm, x_TD))
    return x_TD + norm(params.mlp_post_norm, fed_TD), cache


def unembed(config: ModelConfig, params: ModelParams, hidden_TD: jax.Array) -> jax.Array:
    """Logits, float32 [T, V], after the final soft-cap if the model has one."""
    table_VD = params.embed_VD if config.tied_embeddings else params.unembed_VD
    logits_TV = contract("TD,VD->TV", hidden_TD, table_VD, jnp.float32)
    if params.unembed_bias_V is not None:
        logits_TV = logits_TV + params.unembed_bias_V.astype(jnp.float32)
    if config.final_softcap is not None:
        logits_TV = config.final_softcap * jnp.tanh(logits_TV / config.final_softcap)
    return logits_TV
