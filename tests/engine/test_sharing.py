"""What sharing saves, in pages and in work: a system prompt common to all, and `n` choices of one.

A tiny network for the former; for the latter the rule model, whose tokens show what it read.
"""

import numpy as np

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.state import totals
from tests.engine.rule_model import outputs
from tests.engine.test_llm import DEFAULTS, ask, greedy
from tests.engine.test_metrics import RULE_VOCAB, Clock, rule_engine
from tests.tiny import VOCAB, tiny_config, tiny_params


def test_a_system_prompt_common_to_32_requests_is_computed_once_per_row():
    config = tiny_config(num_layers=1, max_position=1024)
    params, rng = tiny_params(config), np.random.default_rng(0)
    system = rng.integers(0, VOCAB, 512).tolist()
    prompts = [system + rng.integers(0, VOCAB, 8).tolist() for _ in range(32)]
    settings = {"max_model_len": 600, "page_size": 16, "max_num_seqs": 4}
    settings |= {"max_num_batched_tokens": 64}
    llm = LLM.from_params(config, params, **DEFAULTS | settings)
    apart = [{"prompt_token_ids": p, "cache_salt": i} for i, p in enumerate(prompts, start=1)]
    tokens, work = [], [0]
    for asked in (prompts, apart):
        tokens.append(ask(llm, asked, greedy(4)))
        work.append(llm.engine.counters()["prefill_tokens"])
    assert tokens[0] == tokens[1]
    shared, alone = np.diff(work)
    assert alone == 32 * 520
    assert shared <= 0.2 * alone


def test_eight_choices_hold_the_prompt_once_and_one_partial_page_each():
    """At most prompt pages + 8 copies of the last one, and what the outputs grow by."""
    prompt, new, C = list(range(3, 21)), 9, 4  # four pages and a half
    engine = rule_engine(
        Clock(), overlap=False, rounds=1, max_num_seqs=8, num_slots=8, num_pages=60, token_budget=32
    )
    params = SamplingParams(n=8, temperature=1.0, max_tokens=new)
    choices = engine.add_request("a", prompt, params)
    most = 0
    while engine.has_unfinished:
        engine.step()
        slots, pool = engine._state.slots, engine._state.pool
        used = int((np.asarray(pool.refcount_P) > 0).sum())
        computed = int(np.asarray(slots.num_computed_S).max())
        grown = 8 * max(-(-computed // C) - 5, 0)
        assert used <= 5 + 8 + grown
        most = max(most, used)
    expected, _ = outputs(prompt, RULE_VOCAB, len(prompt) + new)
    assert [choice.token_ids for choice in choices] == [expected] * 8
    # Four full prompt pages and three of its own per row, once the first choice, which is a round
    # ahead, has ended. Without sharing each row would hold seven.
    assert most == 4 + 7 * 3
    assert totals(engine._state)["page_copies"] == 8
