"""The engine on the real SmolLM2-135M: whatever the schedule, each request gets its own tokens.

64 requests, half greedy and half sampled with seeds, go through eight rows and a pool too small for
them, so that some are preempted. Each token is compared, exactly, with the one chosen from a single
forward pass over the request's whole sequence, which knows no schedule, chunk, prefix hit or
preemption: if all are equal, so is what the request yields alone. Some are also run alone.

Of six sets of settings, in which any two values of two settings meet, one runs on the whole model
and five on its first layers alone: a network of real weights that compiles in half the time.
"""

from dataclasses import replace
from functools import lru_cache, partial
from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.llm import LLM
from engine.sampling import sample
from engine.sampling_params import SamplingParams
from engine.sampling_rows import RowFacts, SamplingLimits, empty_rows, fill_row
from engine.state import empty_requests
from engine.step import RowView
from engine.tokenizer import load_tokenizer
from models.batch import ragged_batch
from models.checkpoint.load import load_model
from models.checkpoint.registry import fetch
from models.kv_cache import init_cache
from models.model import cache_specs, forward, unembed
from tests.quick_engines import use_quick_engines

pytestmark = pytest.mark.real_model

TEXT = """The old harbour lay quiet under a thin fog, and only the bell of the fishing boats
told the people of the town that the tide was turning. Anna counted the steps from the market to
the pier: one hundred and twelve, as always. She carried a basket of bread, three letters and a
small brass key that nobody had asked for in years. At the end of the pier stood a hut with a
green door. def area(width, height): return width * height # in square metres. The key turned
without a sound; inside, a lamp was burning, and on the table lay a map of islands which no ship
had ever visited. 1, 1, 2, 3, 5, 8, 13."""

MAX_LEN, PAGE_SIZE, NUM_PAGES = 124, 4, 32
ALL_LAYERS, FIRST_LAYERS = 30, 2
VALUES = {
    "max_num_batched_tokens": (16, 64, 256),
    "enable_prefix_caching": (True, False),
    "overlap": (True, False),
    "scheduling_policy": ("continuous", "static"),
}
RUNS = [
    dict(zip(VALUES, values, strict=True))
    for values in (
        (16, True, True, "continuous"),
        (16, False, False, "static"),
        (64, True, False, "static"),
        (64, False, True, "continuous"),
        (256, True, True, "static"),
        (256, False, False, "continuous"),
    )
]


@lru_cache
def whole_network():
    path = fetch("smollm2-135m")
    config, params = load_model(path, jnp.float32)
    return config, params, load_tokenizer(path).encode(TEXT)


def network(num_layers: int):
    config, params, _ = whole_network()
    layers = slice(num_layers)
    return (
        replace(config, layers=config.layers[layers]),
        params.replace(layers=params.layers[layers]),
    )


@lru_cache
def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 3 to 100 tokens in random order; every other one begins as the text does."""
    ids = whole_network()[2]
    rng = np.random.default_rng(0)
    bounds = [(80, 101)] * 4 + [(3, 40)] * 60
    lengths = [int(rng.integers(*bound)) for bound in rng.permutation(bounds)]
    starts = [0 if i % 2 else int(rng.integers(len(ids))) for i in range(64)]
    prompts = [(ids * 3)[start : start + n] for start, n in zip(starts, lengths, strict=True)]
    kinds = (
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.95},
        {"temperature": 0, "repetition_penalty": 1.2},
        {"temperature": 1.2, "top_k": 40, "frequency_penalty": 0.5},
    )
    settings = [
        SamplingParams(
            **kinds[i // 2 % 4], seed=i, max_tokens=int(rng.choice([2, 6, 24])), ignore_eos=True
        )
        for i in range(64)
    ]
    return prompts, settings


def assert_each_request_gets_its_own_tokens(num_layers: int, settings: dict) -> None:
    llm = LLM.from_params(
        *network(num_layers),
        max_num_seqs=8,
        max_model_len=MAX_LEN,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        **settings,
    )
    prompts, sampling = requests()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert [len(t) for t in tokens] == [s.max_tokens for s in sampling]
    metrics = llm.get_metrics()
    assert metrics.preemptions > 0
    assert (metrics.prefix_hit_tokens > 0) == settings["enable_prefix_caching"]
    assert metrics.pages_used == 0
    assert tokens == recomputed(num_layers, tuple(map(tuple, tokens)))
    for i in range(0, 64, 16):  # the salt keeps it from finding its own pages
        alone = {"prompt_token_ids": prompts[i], "cache_salt": i + 1}
        output = llm.generate(alone, sampling[i], use_tqdm=False)[0]
        assert output.outputs[0].token_ids == tokens[i]


def test_b46_b50_real_model_mixed_batch_equals_recomputation_and_each_alone():
    assert_each_request_gets_its_own_tokens(ALL_LAYERS, RUNS[0])


@pytest.mark.parametrize("settings", RUNS[1:], ids=lambda run: "-".join(map(str, run.values())))
def test_b46_b50_every_pair_of_settings_equals_recomputation_and_each_alone(settings, monkeypatch):
    use_quick_engines(monkeypatch)
    assert_each_request_gets_its_own_tokens(FIRST_LAYERS, settings)


def test_any_two_values_of_two_settings_meet_in_a_run():
    for a, b in combinations(VALUES, 2):
        assert {(run[a], run[b]) for run in RUNS} == set(product(VALUES[a], VALUES[b]))


# ---- what each position's token must be, given the tokens before it ------------------------------

SLOTS, WIDTH, ROWS = 16, 512, 128  # sequences, tokens and output positions of one pass


@lru_cache
def recomputed(num_layers: int, outputs: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """The token that follows each prefix of each output, from passes over whole sequences."""
    (config, params), (prompts, sampling) = network(num_layers), requests()
    found = [[] for _ in prompts]
    for group in packs(prompts, outputs):
        sequences = [[*prompts[i], *outputs[i][:-1]] for i in group]
        token_R = iter(
            np.asarray(choose(config, params, *arrays(config, group, sequences, prompts, sampling)))
        )
        for i in group:
            found[i] = [int(next(token_R)) for _ in outputs[i]]
    return found


def packs(prompts, outputs):
    group, tokens, rows = [], 0, 0
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens, rows = tokens + len(prompt) + len(output) - 1, rows + len(output)
        if len(group) == SLOTS or tokens > WIDTH or rows > ROWS:
            yield group
            group, tokens, rows = [], len(prompt) + len(output) - 1, len(output)
        group.append(i)
    yield group


def arrays(config, group, sequences, prompts, sampling):
    limits = SamplingLimits(vocab_size=config.vocab_size)
    tokens_SX, q_len_S = np.zeros((SLOTS, MAX_LEN), np.int32), np.zeros(SLOTS, np.int32)
    prompt_len_S = np.zeros(SLOTS, np.int32)
    rows, slot_R, num_tokens_R = empty_rows(ROWS, limits), np.zeros(ROWS, np.int32), []
    for s, (i, sequence) in enumerate(zip(group, sequences, strict=True)):
        tokens_SX[s, : len(sequence)], q_len_S[s] = sequence, len(sequence)
        prompt_len_S[s] = len(prompts[i])
        for known in range(len(prompts[i]), len(sequence) + 1):
            fill_row(rows, len(num_tokens_R), sampling[i], RowFacts(sampling[i].seed), limits)
            slot_R[len(num_tokens_R)] = s
            num_tokens_R.append(known)
    samples_R = np.arange(ROWS) < len(num_tokens_R)
    num_tokens_R = np.pad(np.array(num_tokens_R, np.int32), (0, ROWS - len(num_tokens_R)))
    return tokens_SX, q_len_S, prompt_len_S, rows, slot_R, num_tokens_R, samples_R


@partial(jax.jit, static_argnums=0)
def choose(config, params, tokens_SX, q_len_S, prompt_len_S, rows, slot_R, num_tokens_R, samples_R):
    q_start_S = jnp.cumsum(q_len_S) - q_len_S
    batch = ragged_batch(
        jnp.zeros(WIDTH, jnp.int32),
        q_start_S,
        q_len_S,
        q_len_S,
        prompt_len_S,
        1 + jnp.arange(SLOTS, dtype=jnp.int32)[:, None],
        max_q_len=WIDTH,
    )
    tokens_T = tokens_SX.at[batch.slot_T, batch.positions_T].get(mode="fill", fill_value=0)
    cache = init_cache(cache_specs(config), SLOTS + 1, MAX_LEN, jnp.float32)
    hidden_TD, _ = forward(config, params, cache, batch.replace(tokens_T=tokens_T))
    at_R = q_start_S.at[slot_R].get(mode="clip") + num_tokens_R - 1
    logits_RV = unembed(config, params, hidden_TD.at[at_R].get(mode="clip"))
    wanted = empty_requests(ROWS, 8, rows).replace(
        prompt_len=prompt_len_S.at[slot_R].get(mode="clip")
    )
    view = RowView(wanted, slot_R, num_tokens_R, tokens_SX)
    limits = SamplingLimits(vocab_size=config.vocab_size)
    return sample(limits, view, logits_RV, samples_R).token_R
