"""Rotary settings out of a config.json, in every spelling that checkpoints use.

`rope_theta` beside `rope_scaling` (with the kind as "type" or "rope_type"), or one
`rope_parameters` dictionary, which may be nested per layer type; the original length inside it or
beside it. An unknown kind, and any key that the kind does not have, is refused by name.
"""

from collections.abc import Mapping
from typing import Any, get_args

from models.config import RopeKind, RopeSpec
from models.families.fields import Fields, flag, integer, nullable_number, number

_ORIGINAL = "original_max_position_embeddings"
_KIND_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
}
assert set(_KIND_KEYS) == set(get_args(RopeKind))
# Read by every kind, or of no effect in any: `finetuned` only tells how a model was made.
_COMMON_KEYS = ("type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned", _ORIGINAL)


def read_rope(
    fields: Fields,
    head_dim: int,
    max_position: int,
    *,
    default_theta: float = 10_000.0,
    partial: bool = False,
    aliases: Mapping[str, str] | None = None,
) -> RopeSpec:
    """One rotary spec for the whole model.

    `partial` says whether the family may rotate a part of each head; `aliases` are the family's
    older names of kinds.
    """
    merged = {"rope_theta": number(fields, "rope_theta", default_theta)}
    if fields.get("partial_rotary_factor") is not None:
        merged["partial_rotary_factor"] = fields["partial_rotary_factor"]
    merged |= {key: value for key, value in rope_dict(fields).items() if value is not None}
    # As in the reference: the original length beside the dictionary goes before the one in it.
    if fields.get(_ORIGINAL) is not None:
        merged[_ORIGINAL] = fields[_ORIGINAL]
    return rope_spec(merged, head_dim, max_position, partial=partial, aliases=aliases)


def rope_dict(fields: Fields) -> dict[str, Any]:
    """`rope_scaling` or `rope_parameters`; both at once must agree."""
    scaling, parameters = fields.get("rope_scaling") or {}, fields.get("rope_parameters") or {}
    for key, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if not isinstance(value, Mapping):
            raise ValueError(f"config.json: {key} must be an object, got {value!r}")
    if scaling and parameters and scaling != parameters:
        raise ValueError("config.json: rope_scaling and rope_parameters are both given and differ")
    return dict(scaling or parameters)


def rope_spec(
    rope: Mapping[str, Any],
    head_dim: int,
    max_position: int,
    *,
    partial: bool = False,
    aliases: Mapping[str, str] | None = None,
) -> RopeSpec:
    """The spec of one flat dictionary that holds its own `rope_theta`."""
    kind = rope.get("rope_type", rope.get("type")) or "default"
    if isinstance(kind, str):
        kind = (aliases or {}).get(kind, kind)
    if not isinstance(kind, str) or kind not in _KIND_KEYS:
        raise ValueError(
            f"config.json: rope kind {kind!r} is not supported; known: {', '.join(_KIND_KEYS)}"
        )
    known = (*_COMMON_KEYS, *_KIND_KEYS[kind])
    unknown = sorted(key for key in rope if key not in known and rope[key] is not None)
    if unknown:
        raise ValueError(f"config.json: rope kind {kind!r} has no setting {', '.join(unknown)}")

    part = number(rope, "partial_rotary_factor", 1.0)
    if part > 1 or (part < 1 and not partial):
        raise ValueError(f"config.json: partial_rotary_factor = {part} is not supported here")
    settings: dict[str, Any] = {}
    if kind in ("llama3", "yarn", "longrope"):
        settings["original_max_position"] = integer(rope, _ORIGINAL, max_position)
    if kind in ("yarn", "longrope"):
        default_factor = max_position / settings["original_max_position"]
        settings["factor"] = number(rope, "factor", default_factor)
        settings["attention_factor"] = nullable_number(rope, "attention_factor", None)
    elif kind != "default":
        settings["factor"] = number(rope, "factor", None)
    if kind == "llama3":
        settings["low_freq_factor"] = number(rope, "low_freq_factor", None)
        settings["high_freq_factor"] = number(rope, "high_freq_factor", None)
    elif kind == "yarn":
        settings["beta_fast"] = number(rope, "beta_fast", 32.0)
        settings["beta_slow"] = number(rope, "beta_slow", 1.0)
        settings["truncate"] = flag(rope, "truncate", True)
        for key in ("mscale", "mscale_all_dim"):
            # Zero is how some configs write "not given".
            settings[key] = nullable_number(rope, key, None) if rope.get(key) != 0 else None
    elif kind == "longrope":
        for key in ("short_factor", "long_factor"):
            settings[key] = _factors(rope, key)
    return RopeSpec(
        theta=number(rope, "rope_theta", None),
        rotary_dim=int(head_dim * part),
        kind=kind,
        max_position=max_position,
        **settings,
    )


def _factors(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = rope.get(key)
    if not isinstance(values, list | tuple):
        raise ValueError(f"config.json: longrope needs {key}, a list of numbers, got {values!r}")
    return tuple(number({key: value}, key, None) for value in values)
