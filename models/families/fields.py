"""Typed reading of a config.json: one value, its default, one clear refusal.

In: the file's fields as a mapping. Out: Python values, checked. Invariant: a field that would
change the maths is either read by the family or refused by name, never passed over.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from models.config import Activation

Fields = Mapping[str, Any]

# Fields that change the maths, with the values under which they do not. A family passes the ones
# that it reads itself to `refuse_unsupported`.
NEUTRAL_VALUES: dict[str, tuple] = {
    "add_cross_attention": (None, False),
    "alibi": (None, False),
    "attention_bias": (None, False),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "is_encoder_decoder": (None, False),
    "kv_lora_rank": (None,),
    "layer_types": (None,),
    "lm_head_bias": (None, False),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "mlp_bias": (None, False),
    "n_routed_experts": (None, 0),
    "no_rope_layers": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "parallel_attn": (None, False),
    "partial_rotary_factor": (None, 1),
    "pruned_heads": (None, {}),
    "qk_layernorm": (None, False),
    "quantization_config": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleave": (None, False),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "sliding_window": (None,),
    "use_alibi": (None, False),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
    "use_parallel_residual": (None, False),
    "use_qk_norm": (None, False),
}

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
assert set(ACTIVATIONS.values()) == set(get_args(Activation))


def refuse_unsupported(fields: Fields, family: str, reads: Sequence[str] = ()) -> None:
    for key, neutral in NEUTRAL_VALUES.items():
        if key in fields and key not in reads and fields[key] not in neutral:
            shown = str(fields[key])
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            raise ValueError(f"config.json: {key} = {shown} is not supported for {family} models")


def integer(fields: Fields, key: str, default: int | None, minimum: int = 1) -> int:
    """`default` stands in for an absent or null field; None means the field is needed."""
    value = _present(fields, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"config.json: {key} must be an integer >= {minimum}, got {value!r}")
    return value


def nullable_integer(fields: Fields, key: str, default: int | None) -> int | None:
    """Null is a value of its own (no window, no limit); `default` is for an absent field only."""
    return None if fields.get(key, default) is None else integer(fields, key, default)


def number(fields: Fields, key: str, default: float | None) -> float:
    """A positive finite number."""
    value = _present(fields, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.json: {key} must be a number, got {value!r}")
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"config.json: {key} must be positive and finite, got {value!r}")
    return float(value)


def nullable_number(fields: Fields, key: str, default: float | None) -> float | None:
    return None if fields.get(key, default) is None else number(fields, key, default)


def flag(fields: Fields, key: str, default: bool) -> bool:
    value = _present(fields, key, default)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key} must be true or false, got {value!r}")
    return value


def activation(fields: Fields, key: str, default: str) -> Activation:
    name = _present(fields, key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"config.json: {key} = {name!r} is not supported; known: {known}")
    return ACTIVATIONS[name]


def _present(fields: Fields, key: str, default: Any) -> Any:
    value = fields.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json: {key} is missing")
    return value


def token_ids(fields: Fields, key: str, default: int | None) -> tuple[int, ...]:
    """One id, several or none; ascending and without repeats."""
    value = fields.get(key, default)
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
        raise ValueError(f"config.json: {key} must be a token id or a list of them, got {value!r}")
    return tuple(sorted(set(values)))
