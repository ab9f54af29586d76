"""A network as the engine's `StepModel`: forward over the paged cache, then the sampler.

A token's state is its hidden state after the final norm.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from engine.logprobs import Logprobs, empty_logprobs, logprobs_of
from engine.rows import ceil_div
from engine.sampling import SamplingLimits, no_sample, real_columns, sample
from engine.step import RowView, Sampled
from models.batch import RaggedBatch
from models.config import ModelConfig
from models.kv_cache import KVCache, copy_pages
from models.model import ModelParams, forward, unembed
from pallas_kernels.chips import Chip
from sharding.axes import HeadSplit

SCORED_AT_ONCE = 32  # prompt tokens whose logits exist at the same time


@dataclass(frozen=True)
class NetworkModel:
    """`min_rows`: matmuls of fewer rows are padded to it (a bfloat16 matvec is slow on CPU).

    `chip` is whose kernels the programs use and the cache is laid out for, see `kernel_choice`.
    `head_split` is how attention runs on several devices, which changes no result: not in the repr.
    """

    config: ModelConfig
    limits: SamplingLimits
    dtype: jnp.dtype
    attention_impl: str = "auto"
    min_rows: int = 1
    chip: Chip | None = None
    head_split: HeadSplit | None = field(default=None, repr=False)

    def copy_pages(self, cache: KVCache, from_R: jax.Array, to_R: jax.Array) -> KVCache:
        return copy_pages(cache, from_R, to_R)

    def no_states(self, num_tokens: int) -> jax.Array:
        return jnp.zeros((num_tokens, self.config.width), self.dtype)

    def run(
        self, params: ModelParams, cache: KVCache, batch: RaggedBatch
    ) -> tuple[KVCache, jax.Array, jax.Array]:
        """Hidden states [T, D]; whether all of a slot's states are finite."""
        hidden_TD, cache = forward(
            self.config,
            params,
            cache,
            self._padded(batch),
            attention_impl=self.attention_impl,
            chip=self.chip,
            head_split=self.head_split,
        )
        hidden_TD = hidden_TD[: batch.slot_T.shape[0]]
        unsound_T = ~jnp.all(jnp.isfinite(hidden_TD), axis=-1)
        unsound_R = (
            jnp.zeros(batch.q_len_S.shape, bool).at[batch.slot_T].max(unsound_T, mode="drop")
        )
        return cache, hidden_TD, ~unsound_R

    def no_scores(self, num_tokens: int) -> Logprobs:
        return empty_logprobs(num_tokens, self.limits.max_logprobs)

    def score(
        self, params: ModelParams, hidden_TD: jax.Array, token_T: jax.Array, asked_T: jax.Array
    ) -> Logprobs:
        """Log-probabilities of the tokens asked for, a block of them at a time."""
        num_tokens = token_T.shape[0]
        size = max(min(SCORED_AT_ONCE, num_tokens), self.min_rows)
        nth_T = jnp.where(asked_T, jnp.cumsum(asked_T) - 1, num_tokens)
        row_N = jnp.full(num_tokens, num_tokens).at[nth_T].set(jnp.arange(num_tokens), mode="drop")

        def score_block(i: jax.Array, found_T: Logprobs) -> Logprobs:
            row_B = row_N.at[i * size + jnp.arange(size)].get(mode="fill", fill_value=num_tokens)
            logits_BV = unembed(self.config, params, hidden_TD.at[row_B].get(mode="clip"))
            logits_BV = real_columns(logits_BV, self.limits.vocab_size)
            token_B = token_T.at[row_B].get(mode="clip")
            found_B = logprobs_of(logits_BV, token_B, self.limits.max_logprobs)
            return jax.tree.map(lambda x, y: x.at[row_B].set(y, mode="drop"), found_T, found_B)

        blocks = ceil_div(jnp.sum(asked_T), size)
        return jax.lax.fori_loop(0, blocks, score_block, self.no_scores(num_tokens))

    def no_sample(self, num_rows: int) -> Sampled:
        return no_sample(self.limits, num_rows)

    def sample(
        self, params: ModelParams, hidden_RD: jax.Array, rows: RowView, samples_R: jax.Array
    ) -> Sampled:
        num_rows = hidden_RD.shape[0]
        missing = max(self.min_rows - num_rows, 0)
        hidden_RD = jnp.pad(hidden_RD, ((0, missing), (0, 0)))
        logits_RV = unembed(self.config, params, hidden_RD)[:num_rows]
        return sample(self.limits, rows, logits_RV, samples_R)

    def _padded(self, batch: RaggedBatch) -> RaggedBatch:
        missing = max(self.min_rows - batch.tokens_T.shape[0], 0)
        no_slot = batch.q_len_S.shape[0]
        return batch.replace(
            tokens_T=jnp.pad(batch.tokens_T, (0, missing)),
            positions_T=jnp.pad(batch.positions_T, (0, missing)),
            slot_T=jnp.pad(batch.slot_T, (0, missing), constant_values=no_slot),
        )
