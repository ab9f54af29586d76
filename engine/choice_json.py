"""Choices as JSON values and back: what was asked for, and how far it has come.

Invariant: a decoded choice equals the encoded one, floats to the bit, because JSON writes the
shortest text that reads back as the same number. Times (fields that end in `_s`) are kept relative
to now: the clock of one process means nothing in another. What the sampler sent beside a token is
kept for choices that asked for log-probabilities; nobody reads it for others.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

import jax
import numpy as np

from engine.dispatch import Choice
from engine.sampling_params import SamplingParams
from engine.sampling_rows import RowFacts

ASKED = (
    "request_id",
    "index",
    "uid",
    "prompt_ids",
    "params",
    "facts",
    "stop_ids",
    "priority",
    "salt",
    "max_len",
    "parent_uid",
)
REACHED = tuple(f.name for f in fields(Choice) if f.name not in ASKED)


def dumps(value: Any) -> str:
    """One line of JSON; numpy's numbers are written like Python's."""
    return json.dumps(value, default=_plain, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> int | float:
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{value!r} is not a number")


def encode_request(choice: Choice) -> dict[str, Any]:
    """What was asked for, the drawn seed included."""
    value = {name: getattr(choice, name) for name in ASKED}
    value |= {"params": _encode_params(choice.params), "facts": dict(vars(choice.facts))}
    return value | {"scores_prompt": choice.prompt_scores is not None}


def decode_request(value: Mapping[str, Any], arrival_s: float) -> Choice:
    facts = dict(value["facts"])
    facts["bad_word_ids"] = tuple(map(tuple, facts["bad_word_ids"]))
    given = {name: value[name] for name in ASKED}
    given |= {"params": _decode_params(value["params"]), "facts": RowFacts(**facts)}
    scores = [None] * len(value["prompt_ids"]) if value["scores_prompt"] else None
    return Choice(**given, arrival_s=arrival_s, prompt_scores=scores)


def encode_choice(choice: Choice, now_s: float) -> dict[str, Any]:
    value = encode_request(choice)
    for name in REACHED:
        value[name] = getattr(choice, name)
        if name.endswith("_s") and value[name] is not None:
            value[name] -= now_s
    asked = choice.params.logprobs is not None
    value["extras"] = [_encode_arrays(extra) for extra in choice.extras] if asked else None
    if choice.prompt_scores is not None:
        scores = choice.prompt_scores
        value["prompt_scores"] = [None if s is None else _encode_arrays(s) for s in scores]
    return value


def decode_choice(
    value: Mapping[str, Any], now_s: float, extra_like: Any, score_like: Any
) -> Choice:
    """The last two are trees of arrays like one of `extras` and one of `prompt_scores`."""
    choice = decode_request(value, value["arrival_s"] + now_s)
    for name in REACHED:
        reached = value[name]
        if name.endswith("_s") and reached is not None:
            reached += now_s
        setattr(choice, name, reached)
    if value["extras"] is None:
        choice.extras = [None] * len(choice.token_ids)
    else:
        choice.extras = [_decode_arrays(extra, extra_like) for extra in value["extras"]]
    if value["prompt_scores"] is not None:
        choice.prompt_scores = [
            None if s is None else _decode_arrays(s, score_like) for s in value["prompt_scores"]
        ]
    return choice


def _encode_arrays(tree: Any) -> list:
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(tree)]


def _decode_arrays(values: list, like: Any) -> Any:
    leaves, structure = jax.tree.flatten(like)
    arrays = [np.asarray(v, leaf.dtype) for v, leaf in zip(values, leaves, strict=True)]
    return jax.tree.unflatten(structure, arrays)


def _encode_params(params: SamplingParams) -> dict[str, Any]:
    """Fields that differ from their defaults."""
    default = SamplingParams()
    value = {f.name: getattr(params, f.name) for f in fields(SamplingParams)}
    value = {name: v for name, v in value.items() if v != getattr(default, name)}
    if "logit_bias" in value:  # keys are numbers, and JSON has no infinity
        pairs = value["logit_bias"].items()
        value["logit_bias"] = [[t, b if math.isfinite(b) else str(b)] for t, b in pairs]
    return value


def _decode_params(value: Mapping[str, Any]) -> SamplingParams:
    value = dict(value)
    if "logit_bias" in value:
        value["logit_bias"] = {token: float(bias) for token, bias in value["logit_bias"]}
    return SamplingParams(**value)
