"""Tensor names of checkpoints in the Llama layout, which most families follow.

`sources` walks the declared parameters and looks each path up in a table, so a parameter without a
name is a KeyError here and cannot be left out of a checkpoint by accident.
"""

import re
from collections.abc import Mapping

from models.config import ModelConfig
from models.families.family import Source, Sources
from models.model import declare
from models.params import flatten

# Stored copies of what is computed here: old files keep the rotary frequencies, and files of models
# with tied embeddings may keep the tied one a second time.
IGNORED = (
    re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    re.compile(r"lm_head\.weight"),
)

TOP = {
    "embed_VD": "model.embed_tokens.weight",
    "final_norm.scale": "model.norm.weight",
    "unembed_VD": "lm_head.weight",
}
ATTENTION = {
    "mixer.wq_NHD": "self_attn.q_proj.weight",
    "mixer.wk_KHD": "self_attn.k_proj.weight",
    "mixer.wv_KHD": "self_attn.v_proj.weight",
    "mixer.wo_DA": "self_attn.o_proj.weight",
    "mixer.bq_NH": "self_attn.q_proj.bias",
    "mixer.bk_KH": "self_attn.k_proj.bias",
    "mixer.bv_KH": "self_attn.v_proj.bias",
    "mixer.bo_D": "self_attn.o_proj.bias",
    "mixer.q_norm.scale": "self_attn.q_norm.weight",
    "mixer.k_norm.scale": "self_attn.k_norm.weight",
}
MLP = {
    "mlp.w_gate_FD": "mlp.gate_proj.weight",
    "mlp.w_up_FD": "mlp.up_proj.weight",
    "mlp.w_down_DF": "mlp.down_proj.weight",
    "mlp.b_gate_F": "mlp.gate_proj.bias",
    "mlp.b_up_F": "mlp.up_proj.bias",
    "mlp.b_down_D": "mlp.down_proj.bias",
}
PRE_NORMS = {
    "mixer_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
}
POST_NORMS = {
    "mixer_post_norm.scale": "post_attention_layernorm.weight",
    "mlp_post_norm.scale": "post_feedforward_layernorm.weight",
}
SANDWICH_NORMS = {
    "mixer_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "pre_feedforward_layernorm.weight",
    **POST_NORMS,
}


def sources(
    config: ModelConfig,
    top: Mapping[str, str | Source],
    layer: Mapping[str, str | Source],
    layer_prefix: str = "model.layers.",
) -> dict[str, Source]:
    """The source of every declared parameter; `layer` is keyed by the path inside a layer."""

    def find(path: str) -> Source:
        if not path.startswith("layers."):
            return _as_source(top[path], "")
        _, index, inner = path.split(".", 2)
        return _as_source(layer[inner], f"{layer_prefix}{index}.")

    return {path: find(path) for path in flatten(declare(config))}


def _as_source(entry: str | Source, prefix: str) -> Source:
    if isinstance(entry, str):
        return Source(prefix + entry)
    return Source(**{**vars(entry), "name": prefix + entry.name})


def llama_sources(config: ModelConfig) -> Sources:
    """The plain layout: a norm before each block."""
    return sources(config, TOP, {**ATTENTION, **MLP, **PRE_NORMS})
