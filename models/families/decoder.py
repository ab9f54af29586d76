"""What nearly all families share: the usual decoder's sizes, windows and ends of sequence.

In: the fields of a config.json and the defaults of the reference's config class. Out: parts of a
`ModelConfig`. Invariant: an absent field means what it means in the reference, family by family.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.config import AttentionSpec, LayerSpec, ModelConfig, NormSpec
from models.families.fields import (
    Fields,
    flag,
    integer,
    nullable_integer,
    number,
    token_ids,
)


@dataclass(frozen=True)
class Sizes:
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    max_position: int

    def attention(self, **settings: Any) -> AttentionSpec:
        """Attention of these sizes; scores are over sqrt(head width) unless `settings` differ."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            **{"scale": self.head_dim**-0.5, **settings},
        )


def read_sizes(fields: Fields, defaults: Mapping[str, int | None]) -> Sizes:
    """The usual decoder's sizes. `defaults` are the reference's config class's own.

    A head width is taken as written; only without one it is hidden size over heads. No number of
    key/value heads means as many as query heads.
    """

    def size(key: str) -> int:
        return integer(fields, key, defaults.get(key))

    width, num_heads = size("hidden_size"), size("num_attention_heads")
    num_kv_heads = nullable_integer(
        fields, "num_key_value_heads", defaults.get("num_key_value_heads")
    )
    head_dim = nullable_integer(fields, "head_dim", defaults.get("head_dim"))
    if head_dim is None:
        if width % num_heads:
            raise ValueError(
                f"config.json: hidden_size {width} is not a multiple of num_attention_heads "
                f"{num_heads} and there is no head_dim"
            )
        head_dim = width // num_heads
    return Sizes(
        vocab_size=size("vocab_size"),
        width=width,
        num_layers=size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        mlp_width=size("intermediate_size"),
        max_position=size("max_position_embeddings"),
    )


def layer_windows(
    fields: Fields, default_types: Sequence[str], window: int | None
) -> tuple[int | None, ...]:
    """The sliding window of each layer, from `layer_types` or, without it, `default_types`."""
    types = fields.get("layer_types")
    types = default_types if types is None else types
    if not isinstance(types, Sequence) or not all(isinstance(kind, str) for kind in types):
        raise ValueError(f"config.json: layer_types must be a list of names, got {types!r}")
    if len(types) != len(default_types):
        raise ValueError(
            f"config.json: layer_types has {len(types)} entries for {len(default_types)} layers"
        )
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"config.json: layer_types names {', '.join(unknown)}, not supported")
    if window is None and "sliding_attention" in types:
        raise ValueError("config.json: sliding_attention in layer_types needs a sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def rms_decoder(
    family: str,
    fields: Fields,
    sizes: Sizes,
    layers: Sequence[LayerSpec],
    *,
    eps: float = 1e-6,
    tied: bool = False,
    bos: int | None = None,
    eos: int | None = None,
    **others: Any,
) -> ModelConfig:
    """A model with RMS norms. `eps`, `tied`, `bos` and `eos` are for fields that are absent."""
    bos_ids = token_ids(fields, "bos_token_id", bos)
    return ModelConfig(
        family=family,
        vocab_size=sizes.vocab_size,
        width=sizes.width,
        layers=tuple(layers),
        norm=NormSpec("rms", number(fields, "rms_norm_eps", eps)),
        max_position=sizes.max_position,
        tied_embeddings=flag(fields, "tie_word_embeddings", tied),
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=token_ids(fields, "eos_token_id", eos),
        **others,
    )
