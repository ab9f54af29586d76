"""What a request may ask of an engine, checked before anything is queued or sent.

In: an engine's sizes and capacities, and a request as a caller gives it or as a file holds it. Out:
nothing but a ValueError or TypeError that names value, limit and fix. Invariant: what passes fits
the arrays of `engine.state` and `engine.sampling_rows`, and can run to its end.
"""

from collections.abc import Sequence
from numbers import Integral

from engine.checks import check_integer, check_kind
from engine.config import EngineConfig
from engine.dispatch import Choice
from engine.sampling_params import SamplingParams
from engine.sampling_rows import RowFacts, SamplingLimits, empty_rows, fill_row
from engine.state import NO_UID

MAX_INT32 = 2**31 - 1


def check_request(
    config: EngineConfig,
    limits: SamplingLimits,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    priority: int = 0,
    salt: int = 0,
    bad_word_ids: Sequence[Sequence[int]] = (),
) -> int:
    """Tokens a request may reach; ValueError if it can never run. `bad_word_ids` spell its
    `params.bad_words`."""
    for name, value, low in (("priority", priority, -MAX_INT32 - 1), ("cache_salt", salt, 0)):
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not whole or not low <= value <= MAX_INT32:
            raise ValueError(f"{name} must be an integer in {low} .. 2**31-1, got {value!r}")
    length = len(prompt_ids)
    if not prompt_ids:
        raise ValueError("the prompt is empty; give at least one token")
    for token in prompt_ids:
        if not 0 <= token < limits.vocab_size:
            raise ValueError(f"token id {token} is outside 0 .. {limits.vocab_size - 1}")
    if length + 1 > config.max_model_len:
        raise ValueError(
            f"the prompt has {length} tokens; with one to generate that exceeds max_model_len "
            f"{config.max_model_len}; shorten it, or allow more if the model takes more"
        )
    max_tokens = params.max_tokens or config.max_model_len
    max_len = min(length + max_tokens, config.max_model_len)
    need = -(-(max_len - 1) // config.page_size)
    if need > config.num_pages - 1:
        raise ValueError(
            f"{length} prompt and {max_len - length} output tokens need {need} pages of "
            f"{config.page_size}, the pool has {config.num_pages - 1}; use more pages, a "
            "shorter prompt or a smaller max_tokens"
        )
    fill_row(empty_rows(1, limits), 0, params, RowFacts(0, 0, bad_word_ids), limits)
    return max_len


def check_choice(config: EngineConfig, limits: SamplingLimits, choice: Choice) -> None:
    """A choice from a file: every field is one that an engine of these sizes could have sent."""
    check_kind("request_id", choice.request_id, str, "a string")
    for name in ("prompt_ids", "stop_ids"):
        ids = getattr(choice, name)
        if not isinstance(ids, list):
            raise TypeError(f"{name} must be a list of token ids, got {ids!r:.80}")
        for token in ids:
            check_integer(f"a token of {name}", token, 0, limits.vocab_size - 1, "use its ids")
    params, facts = choice.params, choice.facts
    for name, value, low, high in (
        ("uid", choice.uid, 0, MAX_INT32),
        ("parent_uid", choice.parent_uid, NO_UID, MAX_INT32),
        ("index", choice.index, 0, params.n - 1),
        ("choice", facts.choice, choice.index, choice.index),
        ("seed", facts.seed, 0, 2**64 - 1),
        ("stop_ids (their number)", len(choice.stop_ids), 0, config.max_stop_ids),
    ):
        check_integer(name, value, low, high, "another value is not what was sent")
    max_len = check_request(
        *(config, limits, choice.prompt_ids, params),
        priority=choice.priority,
        salt=choice.salt,
        bad_word_ids=facts.bad_word_ids,
    )
    check_integer("max_len", choice.max_len, max_len, max_len, "it follows from the settings")
