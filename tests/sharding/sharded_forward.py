"""Run by test_sharded_forward.py in a process with four fake devices: sharded equals single."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.batch import ragged_batch
from models.kv_cache import cache_shardings, init_cache
from models.model import cache_specs, declare, forward, unembed
from models.params import shardings
from sharding.axes import TENSOR_PARALLEL
from tests.tiny import VOCAB, tiny_config, tiny_params


def main() -> None:
    assert jax.device_count() == 4
    config = tiny_config(num_heads=8, num_kv_heads=4, qk_norm="head", qkv_bias=True, out_bias=True)
    params = jax.tree.map(lambda x: x + 0.1, tiny_params(config))
    # 97 columns do not divide by 4; this rule set splits everything but the vocabulary.
    rules = {k: v for k, v in TENSOR_PARALLEL.items() if k != "vocab"}
    mesh = Mesh(np.array(jax.devices()), ("tensor",))
    tokens = np.random.default_rng(0).integers(0, VOCAB, 32)
    batch = ragged_batch(
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray([0, 9], jnp.int32),
        jnp.asarray([9, 20], jnp.int32),
        jnp.asarray([9, 20], jnp.int32),
        jnp.asarray([9, 20], jnp.int32),
        jnp.arange(1, 11, dtype=jnp.int32).reshape(2, 5),
        max_q_len=20,
    )
    cache = init_cache(cache_specs(config), 11, 4, jnp.float32)

    @jax.jit
    def logits(params, cache, batch):
        hidden_TD, cache = forward(config, params, cache, batch)
        return unembed(config, params, hidden_TD)[:29], cache

    single, _ = logits(params, cache, batch)
    split_params = jax.device_put(params, shardings(declare(config), mesh, rules))
    split_cache = jax.device_put(cache, cache_shardings(cache, mesh, rules))
    everywhere = NamedSharding(mesh, PartitionSpec())
    sharded, new_cache = logits(split_params, split_cache, jax.device_put(batch, everywhere))
    error = np.abs(np.asarray(sharded) - np.asarray(single)).max()
    scale = np.abs(np.asarray(single)).max()
    # Reductions over heads and MLP columns are cut in four: another order, same float32 terms.
    assert error <= 1e-5 * scale, (error, scale)
    layer = split_cache.layers[0]
    assert layer.addressable_shards[0].data.nbytes * 4 == layer.nbytes
    text = logits.lower(split_params, split_cache, batch).compile().as_text()
    assert "all-reduce" in text
    assert new_cache.layers[0].shape == layer.shape
    print("sharded equals single", error, scale)


if __name__ == "__main__":
    main()
