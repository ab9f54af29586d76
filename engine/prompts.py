"""Prompts as callers give them: one or several, texts, token ids, mappings, conversations.

In: whatever was given. Out: lists, or a TypeError or ValueError that shows it. A text is never
taken for token ids, nor are bytes, sets or booleans.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from numbers import Integral
from typing import Any

from engine.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]


def conversations(messages: Any) -> list[list]:
    """One conversation or several, as several."""
    messages = _list_of_messages(messages)
    if messages and all(isinstance(message, Mapping) for message in messages):
        return [messages]
    return [_list_of_messages(each) for each in messages]


def _list_of_messages(messages: Any) -> list:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise TypeError(f"messages must be a list of mappings, or of such lists, got {messages!r}")
    return list(messages)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes | Mapping):
        return [prompts]
    try:
        each = iter(prompts)
    except TypeError:  # such as an array without a dimension
        return [prompts]
    prompts = list(each)
    if prompts and all(isinstance(p, Integral) for p in prompts):
        return [prompts]
    return prompts


def with_settings(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    priority: Sequence[int] | None,
) -> list[tuple[Prompt, SamplingParams, int]]:
    """Each prompt with its own settings, which come once for all or one each."""
    prompts = as_list(prompts)
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params] * len(prompts)
    if not isinstance(sampling_params, Sequence):
        raise TypeError(
            f"sampling_params must be SamplingParams or a list of them, got {sampling_params!r}"
        )
    if len(sampling_params) != len(prompts):
        raise ValueError(
            f"{len(prompts)} prompts but {len(sampling_params)} sampling_params; give one for all "
            "or one each"
        )
    priority = [0] * len(prompts) if priority is None else priority
    if not isinstance(priority, Iterable):
        raise TypeError(f"priority must be a list of integers, one per prompt, got {priority!r}")
    priority = list(priority)
    if len(priority) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(priority)} priorities; give one each")
    return list(zip(prompts, sampling_params, priority, strict=True))


def encoded(
    prompt: Prompt, encode: Callable[[str], list[int]] | None
) -> tuple[str | None, list[int], Any]:
    """(text, ids, salt) of a text, token ids, or a mapping with `prompt` or `prompt_token_ids` and
    optionally `cache_salt`; `encode` is the tokenizer's, if there is one."""
    salt: Any = 0
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown or len(set(prompt) & {"prompt", "prompt_token_ids"}) != 1:
            raise ValueError(
                "a prompt mapping holds prompt or prompt_token_ids, and optionally cache_salt; got "
                f"{', '.join(map(str, prompt))}"
            )
        salt = prompt.get("cache_salt", 0)
        if "prompt_token_ids" in prompt:
            return None, token_ids(prompt["prompt_token_ids"]), salt
        prompt = prompt["prompt"]
    if not isinstance(prompt, str):
        return None, token_ids(prompt), salt
    if encode is None:
        raise ValueError("text prompts need a tokenizer; give token ids")
    return prompt, encode(prompt), salt


def token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        ids = list(prompt)
        if isinstance(prompt, bytes | Set) or any(isinstance(token, bool) for token in ids):
            raise TypeError(f"got {prompt!r:.80}")
        return [operator.index(token) for token in ids]
    except TypeError as error:
        raise ValueError(f"token ids must be a list of integers: {error}") from error
