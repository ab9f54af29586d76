"""Prompts as callers give them: one or several, texts, token ids, mappings, conversations.

In: whatever was given. Out: lists, or a TypeError or ValueError that shows it. A text is never
taken for token ids, nor are bytes, sets or booleans.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral
from typing import Any

Prompt = str | Sequence[int] | Mapping[str, Any]


def conversation(messages: Any) -> list:
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


def token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        ids = list(prompt)
        if isinstance(prompt, bytes | Set) or any(isinstance(token, bool) for token in ids):
            raise TypeError(f"got {prompt!r:.80}")
        return [operator.index(token) for token in ids]
    except TypeError as error:
        raise ValueError(f"token ids must be a list of integers: {error}") from error
