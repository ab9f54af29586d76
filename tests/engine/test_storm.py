"""500 requests with every sampling field drawn at random, some dropped half-way: nothing compiles,
nothing is left behind. Callers hold several streams at once and read them in any order."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import fields

import jax
import numpy as np

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.engine.test_llm import CONFIG, DEFAULTS, PARAMS, THREE_PROGRAMS
from tests.engine.test_llm_fields import tokenizer  # noqa: F401 - a fixture
from tests.tiny import VOCAB

NUM_REQUESTS = 500
ONE_VALUE_ONLY = {"prompt_logprobs", "spaces_between_special_tokens"}  # others are refused


@contextmanager
def compilations():
    """A list that grows with each program XLA compiles."""
    seen = []

    def listen(event: str, duration_s: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration_s)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def random_params(rng) -> dict:
    def ids(count):
        return rng.choice(VOCAB, count, replace=False).tolist()

    temperature = float(rng.choice([0.0, 0.7, 1.3]))
    some = {
        "n": 1 if temperature == 0 else int(rng.integers(1, 4)),
        "presence_penalty": float(rng.uniform(-2, 2)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "repetition_penalty": float(rng.uniform(0.5, 2)),
        "top_p": float(rng.uniform(0.1, 1)),
        "top_k": int(rng.integers(-1, 50)),
        "min_p": float(rng.uniform(0, 0.5)),
        "seed": int(rng.integers(2**63)),
        "stop": ["e", "<special>"],
        "stop_token_ids": ids(3),
        "ignore_eos": True,
        "max_tokens": int(rng.integers(4, 24)),
        "min_tokens": int(rng.integers(0, 4)),
        "logprobs": int(rng.integers(0, 6)),
        "detokenize": False,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "truncate_prompt_tokens": int(rng.choice([-1, 5])),
        "logit_bias": {token: float(rng.uniform(-9, 9)) for token in ids(4)},
        "allowed_token_ids": ids(40),
        "bad_words": ["a", "bc"],
    }
    chosen = {name: value for name, value in some.items() if rng.random() < 0.25}
    chosen = {"max_tokens": 6, "temperature": temperature} | chosen
    if not chosen.get("detokenize", True):
        chosen.pop("stop", None)
    return chosen


def test_b107_b48_a_storm_of_requests_compiles_nothing_and_leaves_nothing(tokenizer):  # noqa: F811
    llm = LLM.from_params(CONFIG, PARAMS, tokenizer, **DEFAULTS | THREE_PROGRAMS)
    llm.engine.compile()
    llm.generate("warm", SamplingParams(max_tokens=2), use_tqdm=False)
    programs, compiled_s = dict(llm.engine._programs.compiled), llm.engine.compile_s

    rng = np.random.default_rng(0)
    used, reasons, streams, sent, dropped = set(), Counter(), [], 0, 0
    with compilations() as compiled:
        while sent < NUM_REQUESTS or streams:
            if sent < NUM_REQUESTS and len(streams) < 15:
                chosen = random_params(rng)
                used.update(chosen)
                prompt = rng.integers(0, VOCAB, rng.integers(1, 40)).tolist()
                stem = [7] * int(rng.choice([0, 0, 12]))  # some share a prefix
                streams.append(llm.stream([stem + prompt], SamplingParams(**chosen)))
                sent += 1
                continue
            stream = streams[rng.integers(len(streams))]
            if rng.random() < 0.03:
                stream.close()
                streams.remove(stream)
                dropped += 1
                continue
            output, _ = next(stream)
            if output.finished:
                reasons.update(choice.finish_reason for choice in output.outputs)
                assert next(stream, None) is None
                streams.remove(stream)
        llm.generate("after", SamplingParams(max_tokens=2), use_tqdm=False)
    assert compiled == []
    assert llm.engine._programs.compiled == programs
    assert set(programs) == set(llm.engine.config.program_budgets) == {32, 64, 256}
    assert llm.engine.compile_s == compiled_s

    assert used == {field.name for field in fields(SamplingParams)} - ONE_VALUE_ONLY
    assert set(reasons) == {"stop", "length"}
    assert dropped > 20
    metrics = llm.get_metrics()
    assert metrics.preemptions > 0
    assert (metrics.running, metrics.waiting, metrics.pages_used) == (0, 0, 0)
    assert int(llm.engine._state.pool.num_free) == 39
    assert not llm.engine.has_unfinished


def test_the_counter_of_compilations_counts():
    with compilations() as compiled:
        jax.jit(lambda x: x * 3 + 1)(np.arange(7.0))
    assert len(compiled) == 1
