"""How prompts reach the passes: who waits for whom, and how wide a pass runs."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from engine.state import init_state
from engine.step import advance
from tests.engine.driver import VOCAB, Driver, Request, make_inbox
from tests.engine.rule_model import RuleModel, outputs
from tests.engine.test_advance import BASE, ROOMY, STEMS, assert_right


def test_equal_prompts_that_come_together_are_computed_once():
    """All three fit into the rows at once; the later ones wait for the pages of the first."""
    driver = Driver(ROOMY, rounds=1)
    requests = [Request(uid, STEMS[0][:20], 24) for uid in range(3)]
    driver.run(requests)
    assert_right(driver, requests)
    # 20 tokens, of which the last page is computed by each.
    assert int(driver.state.counters.prefill_tokens) == 20 + 4 + 4
    assert int(driver.state.counters.prefix_hit_tokens) == 16 + 16


def test_a_long_prompt_of_low_priority_keeps_nobody_of_high_priority_waiting():
    driver = Driver(ROOMY, rounds=1)
    long = Request(0, STEMS[0] + STEMS[1][:14], 40, priority=1)  # five passes
    short = Request(1, STEMS[1][:4], 8, arrival=1, priority=0)
    driver.run([long, short])
    assert_right(driver, [long, short])
    assert driver.token_rounds[1][0] == 1


@dataclass(frozen=True)
class CountingModel(RuleModel):
    """The rule model, with a count of the tokens its passes were wide beside the cache."""

    def copy_pages(self, cache, from_R, to_R):
        return super().copy_pages(cache[0], from_R, to_R), cache[1]

    def run(self, params, cache, batch):
        pages_PC, token_T, ok_R = super().run(params, cache[0], batch)
        return (pages_PC, cache[1] + batch.tokens_T.shape[0]), token_T, ok_R


def test_a_pass_is_as_wide_as_its_tokens_ask():
    config = replace(BASE, max_model_len=160, num_pages=90, token_budget=128, inbox_tokens=160)
    assert config.prefill_widths == (16, 128)
    model = CountingModel(VOCAB, config.page_size)
    step = jax.jit(partial(advance, config, model))
    cache, state = (model.init_cache(config.num_pages), jnp.int32(0)), init_state(config, None)
    prompt = np.random.default_rng(1).integers(0, VOCAB, 140).tolist()
    widths = {}
    for uid in range(2):
        before, tokens = int(cache[1]), []
        inbox = make_inbox(config, [Request(uid, prompt, 141)], [])
        while inbox is not None or np.any(np.asarray(state.slots.status_S)):
            cache, state, emitted = step(
                None, cache, state, inbox or make_inbox(config, [], []), jnp.int32(1)
            )
            tokens += [int(t) for t in np.asarray(emitted.token_R).ravel() if t >= 0]
            inbox = None
        assert tokens == outputs(prompt, VOCAB, 141)[0]
        widths[uid] = int(cache[1]) - before
    # 128 + 12 tokens, then a hit of 136 and 4 tokens.
    assert widths == {0: 128 + 16, 1: 16}
