"""Sampling settings as arrays: one row per request, fixed capacities, padding that does nothing.

`SamplingRows` is the `sampling` pytree of `engine.state.Requests`; `.` stands for slots, inbox
entries or rows. The host fills rows of numpy arrays, the device reads them.
"""

import operator
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import struct

from engine.checks import check_integer, check_size
from engine.sampling_params import MAX_TOKEN_ID, SamplingParams

NO_ID = -1  # fills lists of token ids
NO_LOGPROBS = -1
MAX_LISTED = 2**20  # capacities beyond it exceed any vocabulary

CAPACITIES = {  # (least, most) of each
    "max_logprobs": (0, MAX_LISTED),
    "max_logit_bias": (0, MAX_LISTED),
    "max_allowed_ids": (0, MAX_LISTED),
    "max_bad_words": (0, 1024),
    "max_bad_word_len": (1, 1024),
}


@dataclass(frozen=True)
class SamplingLimits:
    """Static capacities of one engine. `vocab_size` may be less than the width of the logits."""

    vocab_size: int
    max_logprobs: int = 20
    max_logit_bias: int = 64
    max_allowed_ids: int = 256
    max_bad_words: int = 32
    max_bad_word_len: int = 8

    def __post_init__(self) -> None:
        check_size("vocab_size", self.vocab_size, 1, MAX_TOKEN_ID)
        for name, (low, high) in CAPACITIES.items():
            check_size(name, getattr(self, name), low, high)


@struct.dataclass
class SamplingRows:
    """Settings of each request; int32 unless said. W bad words of L tokens, right-aligned.

    temperature, top_p, min_p                float32; temperature 0 is greedy
    top_k                                    0 is off
    presence, frequency, repetition          float32 penalties
    min_tokens                               outputs before which no stop token can be chosen
    num_logprobs                             how many best log-probabilities to report, or -1
    seed                                     [., 2] uint32, high and low word
    choice                                   which of the request's n outputs this is
    bias_ids, bias                           [., B] token ids (-1 fills), float32 addends
    allowed_ids                              [., A] token ids (-1 fills); none: all are allowed
    bad_words                                [., W, L] token ids (-1 fills, on the left)
    """

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    top_k: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    min_tokens: jax.Array
    num_logprobs: jax.Array
    seed: jax.Array
    choice: jax.Array
    bias_ids: jax.Array
    bias: jax.Array
    allowed_ids: jax.Array
    bad_words: jax.Array


@dataclass(frozen=True)
class RowFacts:
    """What a request's row needs besides its parameters."""

    seed: int
    choice: int = 0
    bad_word_ids: Sequence[Sequence[int]] = ()


def drawn_seed(seed: int | None, count: int) -> int:
    """For a request that brings none: of the engine's seed and of how many choices came before."""
    if seed is None:
        return secrets.randbits(32)
    return int(np.random.SeedSequence([seed, count]).generate_state(1)[0])


def empty_rows(count: int, limits: SamplingLimits) -> SamplingRows:
    """Numpy rows that ask for nothing: greedy, no filter, no penalty, no edit, no logprobs."""

    def full(value: float, *shape: int, dtype=np.int32) -> np.ndarray:
        return np.full((count, *shape), value, dtype)

    return SamplingRows(
        temperature=full(0, dtype=np.float32),
        top_p=full(1, dtype=np.float32),
        min_p=full(0, dtype=np.float32),
        top_k=full(0),
        presence=full(0, dtype=np.float32),
        frequency=full(0, dtype=np.float32),
        repetition=full(1, dtype=np.float32),
        min_tokens=full(0),
        num_logprobs=full(NO_LOGPROBS),
        seed=full(0, 2, dtype=np.uint32),
        choice=full(0),
        bias_ids=full(NO_ID, limits.max_logit_bias),
        bias=full(0, limits.max_logit_bias, dtype=np.float32),
        allowed_ids=full(NO_ID, limits.max_allowed_ids),
        bad_words=full(NO_ID, limits.max_bad_words, limits.max_bad_word_len),
    )


def fill_row(
    rows: SamplingRows, index: int, params: SamplingParams, facts: RowFacts, limits: SamplingLimits
) -> None:
    """Write a request into row `index` of the numpy `rows`, which must be empty there.

    ValueError, before anything is written, where the request exceeds vocabulary or capacities.
    """
    biases, allowed = params.logit_bias or {}, params.allowed_token_ids or ()
    _check_ids("logit_bias", biases, limits.vocab_size, limits.max_logit_bias)
    _check_ids("allowed_token_ids", allowed, limits.vocab_size, limits.max_allowed_ids)
    _check_bad_words(facts.bad_word_ids, limits)
    for name in ("logprobs", "prompt_logprobs"):
        _check_count(name, getattr(params, name) or 0, limits.max_logprobs, "max_logprobs")
    seed = operator.index(facts.seed)
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in 0 .. 2**64 - 1, got {seed}")

    rows.temperature[index] = params.temperature
    rows.top_p[index] = params.top_p
    rows.min_p[index] = params.min_p
    rows.top_k[index] = 0 if params.top_k >= limits.vocab_size else max(params.top_k, 0)
    rows.presence[index] = params.presence_penalty
    rows.frequency[index] = params.frequency_penalty
    rows.repetition[index] = params.repetition_penalty
    rows.min_tokens[index] = min(params.min_tokens, np.iinfo(np.int32).max)
    rows.num_logprobs[index] = NO_LOGPROBS if params.logprobs is None else params.logprobs
    rows.seed[index] = seed >> 32, seed & 0xFFFFFFFF
    rows.choice[index] = facts.choice
    rows.bias_ids[index, : len(biases)] = list(biases)
    rows.bias[index, : len(biases)] = list(biases.values())
    rows.allowed_ids[index, : len(allowed)] = allowed
    for w, word in enumerate(facts.bad_word_ids):
        rows.bad_words[index, w, -len(word) :] = word


def stop_ids_of(
    params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int, max_stop_ids: int
) -> list[int]:
    """Ids that end the request: the model's (unless ignored) and its own, ascending."""
    own = params.stop_token_ids or ()
    eos = () if params.ignore_eos else eos_token_ids
    ids = sorted({*eos, *own})
    _check_ids("the model's end-of-sequence ids", eos, vocab_size, None)
    _check_ids("stop_token_ids", own, vocab_size, None)
    if len(ids) > max_stop_ids:
        raise ValueError(
            f"stop_token_ids and end-of-sequence ids are {len(ids)} together, the engine holds "
            f"{max_stop_ids}; use fewer or raise max_stop_ids"
        )
    return ids


def bad_word_ids_of(
    bad_words: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word, at the start of a text and after a space.

    `encode` adds no special tokens. Other ways in which a model may spell a word stay possible.
    """
    spellings = (encode(text) for word in bad_words for text in (word, " " + word.lstrip()))
    return tuple(dict.fromkeys(tuple(ids) for ids in spellings if ids))


def _check_ids(name: str, ids: Sequence[int], vocab_size: int, capacity: int | None) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} holds token id {token}, outside 0 .. {vocab_size - 1}")
    if capacity is not None:
        _check_count(
            name, len(ids), capacity, "max_allowed_ids" if "allowed" in name else "max_" + name
        )


def _check_count(name: str, count: int, capacity: int, setting: str) -> None:
    if count > capacity:
        raise ValueError(
            f"{name} asks for {count}, the engine holds {capacity}; use fewer or raise {setting}"
        )


def _check_bad_words(words: Sequence[Sequence[int]], limits: SamplingLimits) -> None:
    if isinstance(words, str | bytes) or not isinstance(words, Sequence):
        raise TypeError(f"bad_word_ids must be a list of lists of token ids, got {words!r:.80}")
    _check_count("bad_words (spellings)", len(words), limits.max_bad_words, "max_bad_words")
    for word in words:
        if isinstance(word, str | bytes) or not isinstance(word, Sequence):
            raise TypeError(f"a bad word must be a list of token ids, got {word!r}")
        if not word:
            raise ValueError("a bad word has no tokens; leave it out")
        most = limits.vocab_size - 1
        for token in word:
            check_integer("a token id of bad_words", token, 0, most, "use ids of the vocabulary")
        name = "a bad word (tokens)"
        _check_count(name, len(word), limits.max_bad_word_len, "max_bad_word_len")
