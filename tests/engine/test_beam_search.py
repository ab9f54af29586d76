"""Beam search against a plain one in Python, over a rule model with made-up log-probabilities.

The rule's next token depends on the whole history as the pages have it, and the log-probabilities
of all tokens on that token: few distinct values, so that ties are everywhere. How many tokens are
possible at all is the model's one parameter. The state's invariants are checked after every step.
"""

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine import beam_search
from engine.beam_search import BeamSearchParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.logprobs import NO_TOKEN, Logprobs
from engine.sampling_params import SamplingParams
from engine.sampling_rows import SamplingLimits
from engine.state import EMPTY
from engine.step import Sampled
from tests.compiling import QUICK
from tests.engine.rule_model import RuleModel, check_invariants, next_token
from tests.engine.test_llm import PREEMPTING, fresh_llm, greedy
from tests.engine.test_llm import PROMPTS as LLM_PROMPTS

RULE_VOCAB, MAX_LOGPROBS = 11, 16
RNG = np.random.default_rng(0)


def made_up(expected, token):
    """The log-probability of `token` where the rule expects `expected`: -7 .. -1."""
    return -1.0 - ((expected * 31 + token * 17 + expected * token) % 7)


@dataclass(frozen=True)
class ScoredRule(RuleModel):
    """Samples the likeliest token; the rule gives the state, `made_up` the distribution."""

    def no_sample(self, num_rows):
        shape = num_rows, MAX_LOGPROBS + 1
        nothing = Logprobs(
            jnp.full(shape, NO_TOKEN, jnp.int32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros(num_rows, jnp.int32),
        )
        return Sampled(self.no_states(num_rows), jnp.ones(num_rows, bool), nothing)

    def sample(self, params, expected_R, rows, samples_R):
        token_V = jnp.arange(self.vocab)
        logprob_RV = made_up(expected_R[:, None], token_V).astype(jnp.float32)
        logprob_RV = jnp.where(token_V < params, logprob_RV, -jnp.inf)
        best_RJ, id_RJ = jax.lax.top_k(logprob_RV, self.vocab)
        id_RJ = jnp.where(jnp.isfinite(best_RJ), id_RJ, NO_TOKEN)
        none = self.no_sample(expected_R.shape[0])
        ids_RL = none.extra.ids_RL.at[:, 0].set(id_RJ[:, 0]).at[:, 1 : self.vocab + 1].set(id_RJ)
        logprobs_RL = none.extra.logprobs_RL.at[:, 1 : self.vocab + 1].set(best_RJ)
        extra = none.extra.replace(ids_RL=ids_RL, logprobs_RL=logprobs_RL)
        return Sampled(id_RJ[:, 0], jnp.ones(expected_R.shape, bool), extra)


CONFIG = EngineConfig(
    max_num_seqs=8,
    num_slots=16,
    max_model_len=40,
    num_pages=90,
    page_size=4,
    token_budget=8,
    inbox_size=16,
    inbox_tokens=80,
)
UNCACHED = replace(CONFIG, enable_prefix_caching=False)
SMALL = replace(CONFIG, num_pages=30)
# Pages of one token, prompts of three tokens at a time, arrivals of two.
PIECES = replace(
    CONFIG, page_size=1, num_pages=300, token_budget=3, max_num_seqs=4, num_slots=4, inbox_size=2
)


class Checked(Engine):
    """Checks what `engine.state` promises after every step."""

    most_pages = 0

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.preempted: set[int] = set()  # uids

    def step(self, *, lockstep=False):
        news = super().step(lockstep=lockstep)
        live = set(self._outbox.out) | set(self._outbox.aborts)
        check_invariants(self.config, self._state, live, may_hold=lockstep)
        used = self.config.num_pages - 1 - int(self._state.pool.num_free)
        self.most_pages = max(self.most_pages, used)
        slots = self._state.slots
        hit_S = (np.asarray(slots.preemptions_S) > 0) & (np.asarray(slots.status_S) != EMPTY)
        self.preempted |= set(np.asarray(slots.requests.uid)[hit_S].tolist())
        return news

    def search(self, prompts, params):
        ids = itertools.count()
        requests = [(list(prompt), 0) for prompt in prompts]
        found = dict(beam_search.run(self, requests, params, lambda: f"search {next(ids)}"))
        if self._outbox.aborts:
            self.step()
        assert not self.has_unfinished
        return [found[i] for i in range(len(prompts))]

    @property
    def all_pages_are_free(self) -> bool:
        return int(self._state.pool.num_free) == self.config.num_pages - 1


@lru_cache
def _programs(config: EngineConfig) -> dict:
    return {}  # compiling is what takes the time: engines of one configuration share it


def engine_of(vocab=RULE_VOCAB, eos=(), config=CONFIG, max_logprobs=MAX_LOGPROBS) -> Checked:
    model = ScoredRule(RULE_VOCAB, config.page_size)
    limits = SamplingLimits(vocab_size=RULE_VOCAB, max_logprobs=max_logprobs)
    cache = model.init_cache(config.num_pages)
    engine = Checked(
        *(config, model, jnp.int32(vocab), cache, limits),
        eos_token_ids=eos,
        compiler_options=QUICK,
    )
    engine._programs.compiled = _programs(config)
    return engine


def reference(prompt, vocab, width, max_tokens, eos=(), penalty=1.0):
    """[(generated tokens, total, why)], best first."""
    beams, ended = [((), 0.0)], []
    for _ in range(max_tokens):
        grown = []
        for tokens, total in beams:
            expected = next_token([*prompt, *tokens], RULE_VOCAB)
            likeliest = sorted(range(vocab), key=lambda v: (-made_up(expected, v), v))
            for token in likeliest[: 2 * width]:
                new = (*tokens, token), total + made_up(expected, token)
                (ended if token in eos else grown).append(new)
        beams = sorted(grown, key=lambda b: -b[1])[:width]
        if not beams:
            break

    def score(item):
        (tokens, total), why = item
        return total / (len(prompt) + len(tokens) - (why == "stop")) ** penalty

    everything = [(b, "stop") for b in ended] + [(b, "length") for b in beams]
    return sorted(everything, key=score, reverse=True)[:width]


def plain(sequences, prompt):
    return [((tuple(s.tokens[len(prompt) :]), s.cum_logprob), s.finish_reason) for s in sequences]


PROMPTS = [RNG.integers(0, 11, n).tolist() for n in (1, 4, 6, 9, 17)]
CASES = {
    "one beam": (11, 1, 9, ()),
    "no end": (11, 4, 12, ()),
    "ends": (11, 4, 12, (3,)),
    "several ends": (11, 3, 10, (0, 3, 7)),
    "one token": (11, 5, 1, (2,)),
    "more beams than tokens": (3, 8, 6, (1,)),
    "only the end": (1, 3, 4, (0,)),
    "two tokens": (2, 8, 9, ()),
    "as many rows as there are": (11, 8, 7, (5,)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_a_plain_search(case):
    vocab, width, max_tokens, eos = case
    prompts = [[token % vocab for token in prompt] for prompt in PROMPTS]
    engine = engine_of(vocab, eos)
    for penalty in (1.0, 0.0, -1.5):
        params = BeamSearchParams(
            width, max_tokens, length_penalty=penalty, include_stop_str_in_output=True
        )
        for prompt, got in zip(prompts, engine.search(prompts, params), strict=True):
            expected = reference(prompt, vocab, width, max_tokens, eos, penalty)
            assert plain(got, prompt) == expected
            assert [s.score for s in got] == sorted((s.score for s in got), reverse=True)
    assert engine.all_pages_are_free


def test_a_beam_for_every_sequence_finds_the_best_of_all():
    vocab, length, prompt = 2, 3, [1, 0, 1]
    totals = {}
    for tokens in itertools.product(range(vocab), repeat=length):
        known = list(prompt)
        totals[tokens] = 0.0
        for token in tokens:
            totals[tokens] += made_up(next_token(known, RULE_VOCAB), token)
            known.append(token)
    (found,) = engine_of(vocab).search([prompt], BeamSearchParams(8, length))
    assert {tuple(s.tokens[3:]): s.cum_logprob for s in found} == totals
    assert [s.cum_logprob for s in found] == sorted(totals.values(), reverse=True)


def test_chunks_and_caching_and_waves_change_nothing():
    params = BeamSearchParams(4, 8)
    expected = [reference(prompt, 11, 4, 8) for prompt in PROMPTS]
    for config in (
        UNCACHED,
        PIECES,
        SMALL,  # one search at a time
    ):
        engine = engine_of(config=config)
        found = engine.search(PROMPTS, params)
        assert [plain(s, p) for s, p in zip(found, PROMPTS, strict=True)] == expected
        assert engine.all_pages_are_free


def test_searches_that_may_not_fit_together_run_one_after_the_other():
    """Each may come to hold 20 of 29 pages; nobody's pages are taken away."""
    engine = engine_of(config=SMALL)
    found = engine.search(PROMPTS[:3], BeamSearchParams(2, 34))
    assert [len(s.tokens) for (s, _) in found] == [len(p) + 34 for p in PROMPTS[:3]]
    assert engine.counters()["preemptions"] == 0


def test_beams_share_pages_and_copy_only_those_they_write():
    prompt = RNG.integers(0, 11, 18).tolist()  # four full pages and half a one
    engine = engine_of(config=UNCACHED)
    engine.search([prompt], BeamSearchParams(8, 3))
    counters = engine.counters()
    # Eight beams write position 18, and again 19, into copies of the half page at most.
    assert 8 <= counters["page_copies"] <= 16
    assert engine.most_pages == 4 + 8
    # Nothing is computed twice.
    assert counters["prefill_tokens"] + counters["decode_tokens"] == 18 + 8 + 8


@pytest.mark.parametrize("first", ["the others", "the searches"])
def test_b46_searches_beside_other_requests_in_a_pool_that_runs_short(first):
    engine = engine_of(config=SMALL)
    params = SamplingParams(temperature=0, max_tokens=30, detokenize=False)
    priority = -1 if first == "the others" else 1
    others = [
        engine.add_request(f"other {i}", PROMPTS[i], params, priority=priority)[0] for i in range(4)
    ]
    for _ in range(3):
        engine.step(lockstep=True)
    ids = itertools.count()
    searches = beam_search.run(
        engine, [(p, 0) for p in PROMPTS[:3]], BeamSearchParams(3, 8), lambda: f"s{next(ids)}"
    )
    for i, sequences in searches:
        assert plain(sequences, PROMPTS[i]) == reference(PROMPTS[i], 11, 3, 8)
    while engine.has_unfinished:
        engine.step(lockstep=True)
    preempted_others = engine.preempted & {other.uid for other in others}
    if first == "the others":
        assert engine.preempted - preempted_others  # beams, and they came back
    else:
        assert engine.preempted == preempted_others != set()
    for other, prompt in zip(others, PROMPTS[:4], strict=True):
        expected = reference(prompt, 11, 1, 30)
        assert tuple(other.token_ids) == expected[0][0][0]
    assert engine.all_pages_are_free


def test_b46_preempted_beams_of_a_network_are_those_of_an_ample_pool():
    params = BeamSearchParams(2, 8)
    (ample,) = fresh_llm().beam_search([LLM_PROMPTS[3]], params)
    llm = fresh_llm(**PREEMPTING)
    for i in (4, 5):
        llm.engine.add_request(f"other {i}", LLM_PROMPTS[i], greedy(24), priority=-1)
    (tight,) = llm.beam_search([LLM_PROMPTS[3]], params)
    assert llm.get_metrics().preemptions > 0
    assert [s.tokens for s in tight.sequences] == [s.tokens for s in ample.sequences]
    for a, b in zip(tight.sequences, ample.sequences, strict=True):
        # Keys that are computed again come from a wider pass: float32 rounds otherwise.
        assert a.cum_logprob == pytest.approx(b.cum_logprob, rel=1e-5)


def test_field_ignore_eos_and_field_include_stop_str_in_output():
    prompt, eos = PROMPTS[2], (3,)
    engine = engine_of(eos=eos)
    assert plain(
        engine.search([prompt], BeamSearchParams(4, 12, ignore_eos=True))[0], prompt
    ) == reference(prompt, 11, 4, 12)
    kept, left_out = (
        engine.search([prompt], BeamSearchParams(4, 12, include_stop_str_in_output=i))[0]
        for i in (True, False)
    )
    assert any(s.finish_reason == "stop" for s in kept)
    for a, b in zip(kept, left_out, strict=True):
        assert (a.cum_logprob, a.score) == (b.cum_logprob, b.score)
        stopped = a.finish_reason == "stop"
        assert b.stop_reason == (3 if stopped else None)
        assert b.tokens == (a.tokens[:-1] if stopped else a.tokens)


def test_b24_unsound_logits_end_their_search_alone():
    bad = [1, 2, -2, 3]
    engine = engine_of()
    engine.check = lambda ids, *_, **__: len(ids) + 5  # -2 is how the rule model fails
    found = engine.search([bad, PROMPTS[1]], BeamSearchParams(3, 5))
    assert [s.finish_reason for s in found[0]] == ["error"]
    assert found[0][0].error.startswith("the network gave NaN or infinity")
    assert {s.error for s in found[1]} == {None}
    assert plain(found[1], PROMPTS[1]) == reference(PROMPTS[1], 11, 3, 5)
    assert engine.all_pages_are_free


def test_leaving_a_search_aborts_it():
    engine = engine_of()
    ids = itertools.count()
    searches = beam_search.run(
        engine, [(p, 0) for p in PROMPTS], BeamSearchParams(4, 8), lambda: str(next(ids))
    )
    next(searches)
    searches.close()
    assert not engine.has_unfinished
    engine.step()
    assert engine.all_pages_are_free


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": 0.7}, "temperature must be in 0.0 .. 0.0, got 0.7; .*draws nothing"),
        ({"length_penalty": float("nan")}, "length_penalty must be in -10.0 .. 10.0, got nan"),
        ({"beam_width": 9}, "beam_width 9 needs max_num_seqs 9, the engine has 8"),
        (
            {"max_tokens": 39},
            r"prompts\[1\]: 8 beams of 40 tokens need 96 pages of 4, the pool has 89",
        ),
    ],
)
def test_b21_bad_values_are_refused_before_any_work(fields, message):
    engine = engine_of()
    with pytest.raises(ValueError, match=message):
        engine.search(
            [[1] * 33, [1]], BeamSearchParams(**{"beam_width": 8, "max_tokens": 2} | fields)
        )
    assert not engine.has_unfinished


def test_b21_what_the_engine_cannot_do_is_refused():
    params = BeamSearchParams(4, 2)
    with pytest.raises(ValueError, match="beam_width 4 needs max_logprobs 8, the engine has 7"):
        engine_of(max_logprobs=7).search([[1]], params)
    static = engine_of(config=replace(CONFIG, policy="static"))
    with pytest.raises(ValueError, match="continuous scheduling_policy, the engine has static"):
        static.search([[1]], params)
    for bad, message in (([1, 11], "token id 11 is outside"), ([], "the prompt is empty")):
        with pytest.raises(ValueError, match=rf"prompts\[1\]: {message}"):
            engine_of().search([[1], bad], params)
    for wrong in ({"beam_width": 2.0}, {"ignore_eos": 1}, {"max_tokens": None}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2} | wrong)
    with pytest.raises(TypeError, match="must be BeamSearchParams"):
        engine_of().search([[1]], SamplingParams())
