"""What an engine takes beside weights and cache, known before any of it exists.

In: sizes and capacities. Out: bytes, or a ValueError where the device has less. The state stays in
place; an inbox and the news of a dispatch exist twice, because the next dispatch goes out before
the last one's tokens are read.
"""

import math
from functools import partial
from typing import Any

import jax

from engine.config import EngineConfig
from engine.logprobs import empty_logprobs
from engine.platform import free_memory_bytes
from engine.sampling_rows import SamplingLimits, empty_rows
from engine.state import empty_requests, init_state, no_forks


def state_bytes(config: EngineConfig, limits: SamplingLimits) -> int:
    """Slots, pool, inbox and news of an engine of these sizes."""
    row_bytes = _bytes(empty_rows(1, limits))
    state = _bytes(jax.eval_shape(partial(init_state, config, None)))
    state += config.num_slots * row_bytes
    entry_bytes = _bytes(empty_requests(1, config.max_stop_ids, None)) + row_bytes
    inbox = config.inbox_size * (entry_bytes + 8) + 4 * config.inbox_tokens
    inbox += _bytes(no_forks(config.max_num_seqs))
    found_bytes = _bytes(jax.eval_shape(partial(empty_logprobs, 1, limits.max_logprobs)))
    round_bytes = config.max_num_seqs * (12 + found_bytes)  # token, uid, reason
    round_bytes += config.token_budget * (8 + found_bytes)  # uid and position of a scored token
    return state + 2 * (inbox + config.max_rounds * round_bytes)


def spare_memory_bytes(config: EngineConfig, limits: SamplingLimits) -> int | None:
    """Free memory that an engine leaves for its cache; None where it cannot be told."""
    need_bytes, free_bytes = state_bytes(config, limits), free_memory_bytes()
    if free_bytes is None:
        return None
    if need_bytes > free_bytes:
        raise ValueError(
            f"max_num_seqs {config.max_num_seqs}, max_model_len {config.max_model_len}, "
            f"{config.token_budget} batched tokens, {config.max_rounds} steps per dispatch and "
            f"max_logprobs {limits.max_logprobs} (and capacities of less weight) take "
            f"{need_bytes:,} bytes, {free_bytes:,} are free; lower one of them"
        )
    return free_bytes - need_bytes


def check_cache_fits(config: EngineConfig, limits: SamplingLimits, cache_bytes: int) -> None:
    spare_bytes = spare_memory_bytes(config, limits)
    if spare_bytes is not None and cache_bytes > spare_bytes:
        raise ValueError(
            f"num_pages {config.num_pages} take {cache_bytes:,} bytes, {spare_bytes:,} are left "
            "for them; use fewer pages"
        )


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
