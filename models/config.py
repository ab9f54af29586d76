"""What a network is: frozen, hashable records without weights, device or request.

`ModelConfig` lists one `LayerSpec` per layer; each names its mixer (what mixes tokens and what it
keeps in the cache), its MLP and where the norms stand. Families differ only in these values.
"""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_dim` channels of a head; pairs are (i, i + R/2).

    `max_position` is the model's limit as its config writes it; `original_max_position` the length
    it was trained at before scaling. `attention_factor` None means: derive it (YaRN, longrope).
    Fields that a kind does not use keep their defaults.
    """

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    max_position: int = 0
    original_max_position: int = 0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rotary_dim <= 0 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even and positive, got {self.rotary_dim}")
        if self.theta <= 0:
            raise ValueError(f"rope theta must be positive, got {self.theta}")
        if self.factor <= 0:
            raise ValueError(f"rope factor must be positive, got {self.factor}")
        if self.kind == "dynamic" and (self.rotary_dim < 4 or self.max_position < 1):
            raise ValueError(
                f"dynamic rope needs rotary_dim >= 4 and a max_position, got {self.rotary_dim} and "
                f"{self.max_position}"
            )
        if self.kind in ("llama3", "yarn", "longrope") and self.original_max_position < 2:
            raise ValueError(
                f"{self.kind} rope needs an original_max_position >= 2, got "
                f"{self.original_max_position}"
            )
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope high_freq_factor {self.high_freq_factor} must exceed low_freq_factor "
                f"{self.low_freq_factor}"
            )
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            if self.kind == "longrope" and len(values) != self.rotary_dim // 2:
                raise ValueError(
                    f"longrope {name} needs {self.rotary_dim // 2} values, got {len(values)}"
                )


@dataclass(frozen=True)
class NormSpec:
    """`rms` or `layer` norm with epsilon; `bias` for the layer norm's shift."""

    kind: Literal["rms", "layer"]
    eps: float
    bias: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention over paged keys and values: MHA (K = N), GQA (1 < K < N), MQA (K = 1).

    `window` counts the query itself: a query sees min(position + 1, window) keys. `qk_norm`
    normalises queries and keys before rotation, per head (`head`) or over all heads (`full`).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None = None
    window: int | None = None
    softcap: float | None = None
    qk_norm: Literal["head", "full"] | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_dim) < 1:
            raise ValueError(f"attention sizes must be positive: {self}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} "
                "key/value heads"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"sliding window must be at least 1, got {self.window}")
        if self.rope is not None and self.rope.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim {self.rope.rotary_dim} exceeds head_dim {self.head_dim}")


@dataclass(frozen=True)
class MlpSpec:
    """`gated`: down(act(gate(x)) * up(x)); `plain`: down(act(up(x)))."""

    width: int
    kind: Literal["gated", "plain"] = "gated"
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """One block. Norm placement, x the residual stream:

    `pre`       x += mixer(norm(x));        x += mlp(norm(x))
    `post`      x += norm(mixer(x));        x += norm(mlp(x))
    `sandwich`  x += norm(mixer(norm(x)));  x += norm(mlp(norm(x)))
    """

    mixer: AttentionSpec
    mlp: MlpSpec
    norms: Literal["pre", "post", "sandwich"] = "pre"


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model."""

    family: str
    vocab_size: int
    width: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    max_position: int
    tied_embeddings: bool = False
    embedding_scale: float | None = None
    learned_positions: bool = False
    unembed_bias: bool = False
    final_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a model needs at least one layer")
        if min(self.vocab_size, self.width, self.max_position) < 1:
            raise ValueError(
                f"vocab_size {self.vocab_size}, width {self.width} and max_position "
                f"{self.max_position} must all be positive"
            )
