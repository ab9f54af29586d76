"""A network as the engine's `StepModel`: forward over the paged cache, then the sampler."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from engine.sampling import SamplingLimits, no_sample, sample
from engine.step import RowView, Sampled
from models.batch import RaggedBatch
from models.config import ModelConfig
from models.kv_cache import KVCache, copy_pages
from models.model import ModelParams, forward, unembed


@dataclass(frozen=True)
class NetworkModel:
    """`min_rows`: matmuls of fewer rows are padded to it (a bfloat16 matvec is slow on CPU)."""

    config: ModelConfig
    limits: SamplingLimits
    dtype: jnp.dtype
    attention_impl: str = "auto"
    min_rows: int = 1

    def copy_pages(self, cache: KVCache, from_R: jax.Array, to_R: jax.Array) -> KVCache:
        return copy_pages(cache, from_R, to_R)

    def no_rows(self, num_rows: int) -> jax.Array:
        return jnp.zeros((num_rows, self.config.width), self.dtype)

    def run(
        self, params: ModelParams, cache: KVCache, batch: RaggedBatch
    ) -> tuple[KVCache, jax.Array, jax.Array]:
        """Hidden state of each slot's last token, [R, D]; whether all of its states are finite."""
        hidden_TD, cache = forward(
            self.config, params, cache, self._padded(batch), attention_impl=self.attention_impl
        )
        last_R = jnp.maximum(batch.q_start_S + batch.q_len_S - 1, 0)
        hidden_RD = hidden_TD.at[last_R].get(mode="clip")
        unsound_T = ~jnp.all(jnp.isfinite(hidden_TD), axis=-1)[: batch.slot_T.shape[0]]
        unsound_R = jnp.zeros(last_R.shape, bool).at[batch.slot_T].max(unsound_T, mode="drop")
        return cache, hidden_RD, ~unsound_R

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
