"""Run by test_sharded_forward.py in a process with four fake devices: sharded equals single."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.batch import ragged_batch
from models.kv_cache import cache_shardings, init_cache
from models.model import cache_specs, declare, forward, unembed
from models.params import shardings
from sharding.axes import TENSOR_PARALLEL, HeadSplit
from tests.tiny import VOCAB, tiny_config, tiny_params


def main() -> None:
    assert jax.device_count() == 4
    config = tiny_config(num_heads=8, num_kv_heads=4, qk_norm="head", qkv_bias=True, out_bias=True)
    params = jax.tree.map(lambda x: x + 0.1, tiny_params(config))
    # 97 columns do not divide by 4; this rule set splits everything but the vocabulary.
    rules = {k: v for k, v in TENSOR_PARALLEL.items() if k != "vocab"}
    mesh = Mesh(np.array(jax.devices()), ("tensor",))
    everywhere = NamedSharding(mesh, PartitionSpec())
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

    @partial(jax.jit, static_argnames="head_split", donate_argnames="cache")
    def logits(params, cache, batch, head_split=None):
        hidden_TD, cache = forward(config, params, cache, batch, head_split=head_split)
        return unembed(config, params, hidden_TD)[:29], cache

    single, _ = logits(params, jax.tree.map(jnp.copy, cache), batch)
    whole_heads = {k: v for k, v in rules.items() if k not in ("heads", "kv_heads")}
    for rules_here, parts in ((rules, 4), (whole_heads, 1)):
        split = HeadSplit(mesh, rules_here.get("kv_heads"))
        assert split.parts == parts
        split_params = jax.device_put(params, shardings(declare(config), mesh, rules_here))
        split_cache = jax.device_put(cache, cache_shardings(cache, mesh, rules_here))
        layer = split_cache.layers[0]
        shard = layer.addressable_shards[0].data
        assert shard.nbytes * parts == layer.nbytes
        arguments = (split_params, split_cache, jax.device_put(batch, everywhere), split)
        text = logits.lower(*arguments).compile().as_text()
        # One all-reduce after each attention whose heads are split and one after each MLP.
        assert "all-reduce" in text
        # Nobody gathers or copies the cache: it is each device's own, updated in place.
        assert "all-gather" not in text
        pool = f"f32[{','.join(map(str, shard.shape))}]"
        assert not re.search(rf"= {re.escape(pool)}\S* copy\(", text)
        sharded, new_cache = logits(*arguments)
        error = np.abs(np.asarray(sharded) - np.asarray(single)).max()
        scale = np.abs(np.asarray(single)).max()
        # Reductions over heads and MLP columns are cut in four: another order, same float32 terms.
        assert error <= 1e-5 * scale, (parts, error, scale)
        assert new_cache.layers[0].sharding.shard_shape(layer.shape) == shard.shape
        print("sharded equals single", parts, error, scale)


if __name__ == "__main__":
    main()
