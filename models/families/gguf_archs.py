"""What a GGUF file leaves unsaid about each architecture, and its tensors' names.

GGUF metadata holds sizes; which norms, activation, windows or rotary layout an architecture has is
known to its readers only. This table is that knowledge, as llama.cpp's converter and loader have
it. In: an architecture's name; out: an `Arch`, and the `Source` of every declared parameter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from models.config import Activation, AttentionSpec, LayerSpec, ModelConfig
from models.families.family import Source, Sources
from models.model import declare
from models.params import flatten


@dataclass(frozen=True)
class Arch:
    """One architecture.

    `adjacent_pairs`: rows of q and k are stored for a rotation of neighbouring channels.
    `fused`: q, k, v are one tensor, and with a gated MLP gate and up another.
    `unrotated_period`: every n-th layer has no rotation.
    `window_period`: with a sliding window in the file, every n-th layer is still global; 0 means
    none is; None means that the architecture has no window and such a file is refused.
    `local_theta`: rotary base of windowed layers where the file names none.
    `softcaps`: of scores and of logits, where the file names none.
    `wide_scale_layers`: a model of so many layers scales scores by width / heads, not head width.
    """

    norms: Literal["pre", "post", "sandwich"] = "pre"
    norm: Literal["rms", "layer"] = "rms"
    activation: Activation = "silu"
    mlp: Literal["gated", "plain"] = "gated"
    qk_norm: Literal["head", "full"] | None = None
    positions: Literal["rotary", "learned"] = "rotary"
    adjacent_pairs: bool = False
    fused: bool = False
    unrotated_period: int | None = None
    window_period: int | None = None
    window: int | None = None
    local_theta: float | None = None
    scaled_embedding: bool = False
    softcaps: tuple[float | None, float | None] = (None, None)
    wide_scale_layers: int | None = None


_GEMMA = Arch(norms="sandwich", activation="gelu_tanh", scaled_embedding=True)

ARCHS: dict[str, Arch] = {
    "llama": Arch(adjacent_pairs=True, window_period=0),
    "smollm3": Arch(adjacent_pairs=True, unrotated_period=4),
    "qwen2": Arch(),
    "qwen3": Arch(qk_norm="head"),
    "phi3": Arch(fused=True, window_period=0),
    "olmo2": Arch(norms="post", qk_norm="full"),
    "gemma2": replace(
        _GEMMA, window_period=2, window=4096, softcaps=(50.0, 30.0), wide_scale_layers=46
    ),
    "gemma3": replace(
        _GEMMA, qk_norm="head", window_period=6, local_theta=10_000.0, wide_scale_layers=62
    ),
    "gpt2": Arch(
        norm="layer", activation="gelu_tanh", mlp="plain", positions="learned", fused=True
    ),
}

_NORMS = {
    "pre": {"mixer_norm": "attn_norm", "mlp_norm": "ffn_norm"},
    "post": {"mixer_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm"},
}
_NORMS["sandwich"] = _NORMS["pre"] | _NORMS["post"]
_TOP = {
    "embed_VD": "token_embd.weight",
    "positions_ED": "position_embd.weight",
    "unembed_VD": "output.weight",
    "unembed_bias_V": "output.bias",
    "final_norm.scale": "output_norm.weight",
    "final_norm.bias": "output_norm.bias",
}


def gguf_sources(config: ModelConfig) -> Sources:
    """Where each parameter of a config that came from a GGUF file is stored in it."""
    arch = ARCHS[config.family]
    layers = {layer: _layer_sources(arch, layer) for layer in set(config.layers)}

    def find(path: str) -> Source:
        if path in _TOP:
            return Source(_TOP[path])
        _, index, inner = path.split(".", 2)
        source = layers[config.layers[int(index)]][inner]
        return replace(source, name=f"blk.{index}.{source.name}")

    return {path: find(path) for path in flatten(declare(config))}


def _layer_sources(arch: Arch, layer: LayerSpec) -> Mapping[str, Source]:
    """Sources by the parameter's path inside a layer; names without the leading `blk.N.`."""
    norms = {
        f"{path}.{part}": Source(f"{name}.{suffix}")
        for path, name in _NORMS[layer.norms].items()
        for part, suffix in (("scale", "weight"), ("bias", "bias"))
    }
    up = {"mlp.w_up_FD": Source("ffn_up.weight"), "mlp.b_up_F": Source("ffn_up.bias")}
    gate = {"mlp.w_gate_FD": Source("ffn_gate.weight"), "mlp.b_gate_F": Source("ffn_gate.bias")}
    if arch.fused and layer.mlp.kind == "gated":
        F = layer.mlp.width
        gate = {"mlp.w_gate_FD": Source("ffn_up.weight", rows=(0, F))}
        up = {"mlp.w_up_FD": Source("ffn_up.weight", rows=(F, 2 * F))}
    return {
        **norms,
        **_qkv_sources(arch, layer.mixer),
        "mixer.wo_DA": Source("attn_output.weight"),
        "mixer.bo_D": Source("attn_output.bias"),
        "mixer.q_norm.scale": Source("attn_q_norm.weight"),
        "mixer.k_norm.scale": Source("attn_k_norm.weight"),
        **up,
        **gate,
        "mlp.w_down_DF": Source("ffn_down.weight"),
        "mlp.b_down_D": Source("ffn_down.bias"),
    }


def _qkv_sources(arch: Arch, spec: AttentionSpec) -> dict[str, Source]:
    found, start = {}, 0
    for letter, heads in (
        ("q", spec.num_heads),
        ("k", spec.num_kv_heads),
        ("v", spec.num_kv_heads),
    ):
        stop = start + heads * spec.head_dim
        step = Source("attn_qkv" if arch.fused else f"attn_{letter}")
        if arch.fused:
            step = replace(step, rows=(start, stop))
        if arch.adjacent_pairs and letter != "v":
            step = replace(step, unpermute_heads=heads)
        axes = "NH" if letter == "q" else "KH"
        found[f"mixer.w{letter}_{axes}D"] = replace(step, name=f"{step.name}.weight")
        found[f"mixer.b{letter}_{axes}"] = replace(step, name=f"{step.name}.bias")
        start = stop
    return found
