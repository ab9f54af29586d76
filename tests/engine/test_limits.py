"""Sizes that no machine holds are refused before anything is made, and so is what breaks them."""

import re
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import pytest

from engine import memory
from engine.config import EngineConfig
from engine.dispatch import Dispatch, make_inbox
from engine.engine import Engine
from engine.engine_args import EngineArgs, network_engine
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.sampling_rows import SamplingLimits
from tests.engine.rule_model import RuleModel
from tests.engine.test_advance import BASE
from tests.engine.test_checkpoint import Letters
from tests.engine.test_llm import CONFIG, DEFAULTS, PARAMS, fresh_llm

LIMITS = SamplingLimits(vocab_size=97)


def nbytes(*trees) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 4 << 20)


def test_the_bytes_of_an_engine_are_those_of_its_arrays():
    llm = fresh_llm(max_logprobs=7, max_stop_ids=3, max_bad_words=5, max_num_batched_tokens=32)
    engine = llm.engine
    nothing = Dispatch([], [], rounds=1, budget=32)
    inbox = make_inbox(engine.config, engine.limits, nothing)
    twice = nbytes(inbox, engine.emission_like(32))
    expected_bytes = nbytes(engine.snapshot().state) + 2 * twice
    assert memory.state_bytes(engine.config, engine.limits) == expected_bytes


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 2**12},
        {"steps_per_dispatch": 2**10},
        {"max_num_batched_tokens": 2**16},
        {"max_logprobs": 2**14},
        {"max_allowed_ids": 2**17},
    ],
    ids=str,
)
def test_a_state_beyond_memory_is_refused_by_name(little_memory, settings):
    (name,) = settings
    args = EngineArgs(**DEFAULTS | settings)
    told = {"steps_per_dispatch": "steps per dispatch", "max_num_batched_tokens": "batched tokens"}
    said = "capacities" if name == "max_allowed_ids" else told.get(name, name)
    with pytest.raises(ValueError, match=rf"{said}.* take [\d,]+ bytes, 4,194,304 are free"):
        args.engine_config(CONFIG, jnp.float32)
    EngineArgs(**DEFAULTS).engine_config(CONFIG, jnp.float32)


def test_the_cache_gets_what_the_state_leaves(little_memory):
    args = EngineArgs(**DEFAULTS | {"max_num_seqs": 512, "max_logprobs": 0, "max_allowed_ids": 0})
    config = args.engine_config(CONFIG, jnp.float32)
    spare = (4 << 20) - memory.state_bytes(
        replace(config, num_pages=2), args.sampling_limits(CONFIG)
    )
    assert config.num_pages == int(spare * 0.9) // 1024  # 4 positions of one layer, 1,024 bytes


def test_pages_beyond_memory_are_refused_whoever_asks(little_memory):
    config = EngineArgs(**DEFAULTS).engine_config(CONFIG, jnp.float32)
    with pytest.raises(ValueError, match=r"num_pages 4000 take 4,096,000 bytes"):
        network_engine(CONFIG, PARAMS, replace(config, num_pages=4000), LIMITS)


def test_where_memory_cannot_be_told_pages_must_be_given(monkeypatch):
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: None)
    with pytest.raises(ValueError, match=r"cannot tell how much memory is free.* num_pages, 49"):
        EngineArgs(**DEFAULTS).engine_config(CONFIG, jnp.float32)
    args = EngineArgs(**DEFAULTS | {"num_pages": 30})
    assert args.engine_config(CONFIG, jnp.float32).num_pages == 30


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("max_num_seqs", 2**17, 2**16),
        ("max_num_batched_tokens", 2**31, 2**24),
        ("steps_per_dispatch", 10**9, 2**10),
        ("page_size", 2**40, 2**20),
        ("max_stop_ids", 10**30, 2**10),
    ],
)
def test_absurd_sizes_are_refused(name, value, limit):
    with pytest.raises(ValueError, match=f"{name} must be at most {limit}, got {value}"):
        EngineArgs(**{name: value})


def test_absurd_capacities_are_refused():
    for name in ("max_logprobs", "max_logit_bias", "max_allowed_ids", "max_bad_words"):
        with pytest.raises(ValueError, match=f"{name} must be at most .*, got 2097152"):
            fresh_llm(**{name: 2**21})
    with pytest.raises(TypeError, match=r"max_logprobs must be an integer, got 1\.5"):
        fresh_llm(max_logprobs=1.5)


def test_tokens_that_32_bits_cannot_count_are_refused():
    sizes = {"num_slots": 2**16, "num_pages": 40, "inbox_tokens": 2**20}
    EngineConfig(max_num_seqs=2**10, max_model_len=2**20, **sizes)
    with pytest.raises(ValueError, match=r"max_num_seqs 2048 .* are 2,147,483,648 tokens"):
        EngineConfig(max_num_seqs=2**11, max_model_len=2**20, **sizes)
    for name in ("max_stop_ids", "num_slots", "inbox_size"):
        with pytest.raises(TypeError, match=f"{name} must be an integer"):
            replace(BASE, **{name: "8"})
    with pytest.raises(TypeError, match="enable_prefix_caching must be True or False"):
        replace(BASE, enable_prefix_caching=None)


def test_a_refused_setting_leaves_an_older_record_alone(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("older")
    with pytest.raises(ValueError, match="do not fit"):
        fresh_llm(record=path, num_pages=10**9)
    assert path.read_text() == "older"
    with pytest.raises(ValueError, match=r"record .*nowhere.* cannot be written"):
        fresh_llm(record=tmp_path / "nowhere" / "run.jsonl")


@pytest.mark.parametrize(
    "fields_of",
    [
        {"logprobs": 21},
        {"logit_bias": dict.fromkeys(range(65), 0.5)},
        {"allowed_token_ids": range(97), "capacity": {"max_allowed_ids": 96}},
        {"stop_token_ids": range(9)},
        {"bad_words": ["abcdefghi"]},
        {"bad_words": [chr(40 + i) for i in range(33)]},
    ],
    ids=lambda f: next(iter(f)),
)
def test_a_refused_request_names_the_setting_that_admits_it(fields_of):
    """`raise max_...` is an argument of `LLM`, and raised far enough it does admit the request."""
    asked = {"max_tokens": 1} | fields_of
    capacity = asked.pop("capacity", {})
    llm = LLM.from_params(CONFIG, PARAMS, Letters(), **DEFAULTS | capacity)
    with pytest.raises(ValueError, match=r"raise max_\w+$") as refusal:
        llm.stream("ab", SamplingParams(**asked))
    setting = re.search(r"raise (max_\w+)$", str(refusal.value)).group(1)
    assert setting in {f.name for f in fields(EngineArgs)}
    raised = LLM.from_params(CONFIG, PARAMS, Letters(), **DEFAULTS | {setting: 100})
    raised.stream("ab", SamplingParams(**asked)).close()


def test_every_setting_reaches_the_engine():
    sizes = {"max_num_seqs": 2, "max_model_len": 48, "num_pages": 21, "page_size": 8}
    capacities = {"max_logprobs": 3, "max_logit_bias": 4, "max_allowed_ids": 5}
    capacities |= {"max_bad_words": 6, "max_bad_word_len": 7}
    engine = LLM.from_params(
        *(CONFIG, PARAMS),
        **sizes | capacities,
        **{"max_num_batched_tokens": 24, "steps_per_dispatch": 3, "max_stop_ids": 9},
        **{"enable_prefix_caching": False, "scheduling_policy": "static"},
        **{"overlap": False, "seed": 7, "attention_impl": "reference"},
    ).engine
    config, limits = vars(engine.config), vars(engine.limits)
    assert {name: config[name] for name in sizes} == sizes
    assert {name: limits[name] for name in capacities} == capacities
    assert (config["token_budget"], config["max_rounds"], config["max_stop_ids"]) == (24, 3, 9)
    assert (config["enable_prefix_caching"], config["policy"]) == (False, "static")
    assert (engine.rounds, engine.overlap, engine.seed) == (3, False, 7)
    assert engine.model.attention_impl == "reference"


def rule_engine(seed: int | None) -> Engine:
    model = RuleModel(97, BASE.page_size)
    return Engine(BASE, model, None, model.init_cache(BASE.num_pages), LIMITS, seed=seed)


def test_an_engine_with_a_seed_draws_the_same_seeds_again():
    def drawn(seed):
        engine = rule_engine(seed)
        return [engine.add_request(str(i), [1], SamplingParams())[0].facts.seed for i in range(4)]

    assert drawn(5) == drawn(5)
    assert len({*drawn(5), *drawn(6)}) == 8
    assert drawn(None) != drawn(None)
    own = rule_engine(5).add_request("x", [1], SamplingParams(seed=3, n=2))
    assert [choice.facts.seed for choice in own] == [3, 3]
    with pytest.raises(ValueError, match=r"seed must be in 0 \.\. 18446744073709551615, got -1"):
        EngineArgs(seed=-1)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ([[]], ValueError, "a bad word has no tokens"),
        ([5], TypeError, "a bad word must be a list of token ids, got 5"),
        (["ab"], TypeError, "a bad word must be a list of token ids, got 'ab'"),
        ([[-3]], ValueError, "a token id of bad_words must be in 0 .. 96, got -3"),
        ([[97]], ValueError, "a token id of bad_words must be in 0 .. 96, got 97"),
        ([[1.5]], TypeError, "a token id of bad_words must be an integer, got 1.5"),
    ],
)
def test_bad_words_that_spell_nothing_are_refused(words, error, message):
    engine = rule_engine(None)
    with pytest.raises(error, match=message):
        engine.add_request("x", [1], SamplingParams(), bad_word_ids=words)
    assert not engine.has_unfinished


def test_request_ids_are_strings():
    with pytest.raises(TypeError, match="request_id must be a string, got 5"):
        rule_engine(None).add_request(5, [1], SamplingParams())
