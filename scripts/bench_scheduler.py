"""What scheduling costs: its share of a real decode step, and its parts at a server's sizes.

Share: the engine's whole `advance` against the forward pass and the sampler alone, on the same
rows, in turn. Parts: each function of a round on a full batch whose every row needs a page, less a
call that does nothing with the same arrays.

    python scripts/bench_scheduler.py --model smollm2-135m --rows 32
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from machine_facts import machine_facts
from tqdm import tqdm

from engine.admission import admit
from engine.cli import run
from engine.commit import commit
from engine.config import EngineConfig
from engine.dispatch import Dispatch, make_inbox
from engine.llm import LLM
from engine.platform import enable_compilation_cache, resolve_dtype
from engine.sampling_params import SamplingParams
from engine.schedule import allocate, schedule
from engine.state import RUNNING, BatchState, init_state
from engine.step import advance, make_batch, row_view
from models.checkpoint.load import load_model
from models.checkpoint.registry import resolve

CONTEXT, NEW_TOKENS = 32, 96


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--rows", type=int, default=32, help="running rows of the model's step")
    parser.add_argument("--slots", type=int, default=256, help="slots and rows of the parts")
    parser.add_argument("--pages", type=int, default=16_384, help="pages of the parts")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--output", type=Path, help="also write the JSON object to this file")
    args = parser.parse_args()
    for name in ("rows", "slots", "pages", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def medians_ms(cases: dict[str, tuple[Callable, Callable]], repeats: int, title: str) -> dict:
    """Each case is (prepare, call): call is timed on what prepare returns.

    Every repetition times each case once, so that noise meets all of them alike.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for i in tqdm(range(repeats + 1), desc=title, disable=not sys.stderr.isatty()):
        for name, (prepare, call) in cases.items():
            prepared = jax.block_until_ready(prepare())
            start = time.perf_counter()
            jax.block_until_ready(call(prepared))
            if i > 0:  # the first one compiles
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def share_of_a_step(args: argparse.Namespace) -> dict:
    """One decode round of `args.rows` greedy requests: all of it, and without a scheduler."""
    # Room for the prompt, the warm-up and every timed round, so that no request ends in between.
    max_model_len = CONTEXT + max(NEW_TOKENS, args.repeats + 16)
    enable_compilation_cache()
    network_config, weights = load_model(resolve(args.model), resolve_dtype(args.dtype))
    llm = LLM.from_params(
        network_config, weights, max_num_seqs=args.rows, max_model_len=max_model_len
    )
    engine, rng = llm.engine, np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)
    vocab = network_config.vocab_size
    choices = [
        engine.add_request(str(i), rng.integers(0, vocab, CONTEXT).tolist(), params)[0]
        for i in range(args.rows)
    ]
    while not all(choice.token_ids for choice in choices):
        engine.step()
    budget = min(engine.config.program_budgets)
    idle = Dispatch(arrivals=[], aborts=[], rounds=1, budget=budget)
    engine.send(idle)  # compiled, and whatever was on its way is done
    snapshot = engine.snapshot()
    config, model = replace(engine.config, token_budget=budget), engine.model
    inbox = jax.tree.map(jnp.asarray, make_inbox(config, engine.limits, idle))
    state = snapshot.state
    plan = jax.jit(partial(schedule, config))(state)
    if int(jnp.sum(plan.q_len_R)) != args.rows:
        raise ValueError(f"only {int(jnp.sum(plan.q_len_R))} of {args.rows} rows decode")
    batch = jax.jit(lambda s, p: make_batch(s, p, p.q_len_R > 0, 1))(state, plan)
    rows = jax.jit(row_view)(state, plan)
    asked = plan.q_len_R > 0
    held = {"cache": snapshot.cache, "state": jax.tree.map(jnp.array, state)}
    del snapshot

    @partial(jax.jit, donate_argnums=1)
    def network(weights, cache, batch, rows):
        cache, states_T, _ = model.run(weights, cache, batch)
        return cache, model.sample(weights, states_T, rows, asked).token_R

    def bare(_):
        held["cache"], token_R = network(weights, held["cache"], batch, rows)
        return token_R

    whole = jax.jit(partial(advance, config, model), donate_argnums=(1, 2))

    def step(_):
        held["cache"], held["state"], emitted = whole(
            weights, held["cache"], held["state"], inbox, jnp.int32(1)
        )
        return emitted

    cases = {"advance": (lambda: None, step), "forward and sample": (lambda: None, bare)}
    times = medians_ms(cases, args.repeats, "step")
    share = 1 - times["forward and sample"] / times["advance"]
    return {"rows": args.rows, "dtype": str(model.dtype), "ms": times, "scheduler_share": share}


def full_state(config: EngineConfig, *, staggered: bool) -> tuple[BatchState, int]:
    """Every row decodes; pages are in random order and published, as a server's are after a while.

    Rows stand at the end of their last page, or (`staggered`) each at another place in it, as in a
    usual round: one row in `page_size` fills a page and another needs one.
    """
    num_slots, size = config.num_slots, config.page_size
    pages_each = min((config.num_pages - 1) // num_slots - 1, config.pages_per_seq - 1)
    if pages_each < 2:
        raise ValueError(f"{config.num_pages} pages are too few for {num_slots} slots")
    rng = np.random.default_rng(0)
    order = 1 + rng.permutation(config.num_pages - 1)
    used = num_slots * pages_each
    table_SM = np.zeros((num_slots, config.pages_per_seq), np.int32)
    table_SM[:, :pages_each] = order[:used].reshape(num_slots, pages_each)
    refcount_P = np.zeros(config.num_pages, np.int32)
    refcount_P[order[:used]] = 1
    queue_P = np.zeros(config.num_pages, np.int32)
    queue_P[: order.size - used] = order[used:]
    state = init_state(config, None)
    offset_S = np.arange(num_slots) % size if staggered else np.zeros(num_slots, int)
    computed_S = jnp.asarray(pages_each * size - offset_S, jnp.int32)
    chain_S = computed_S // size
    published = jnp.asarray(refcount_P > 0)
    requests = state.slots.requests.replace(
        uid=jnp.arange(num_slots, dtype=jnp.int32),
        prompt_len=computed_S // 2,
        max_len=computed_S + 1000,
    )
    slots = state.slots.replace(
        requests=requests,
        status_S=jnp.full(num_slots, RUNNING, jnp.int32),
        num_tokens_S=computed_S + 1,
        num_computed_S=computed_S,
        chain_len_S=chain_S,
        chain_page_S=jnp.asarray(table_SM)[jnp.arange(num_slots), chain_S - 1],
        page_table_SM=jnp.asarray(table_SM),
        num_pages_S=jnp.full(num_slots, pages_each, jnp.int32),
    )
    pool = state.pool.replace(
        refcount_P=jnp.asarray(refcount_P),
        queue_P=jnp.asarray(queue_P),
        published_P=published,
        num_free=jnp.int32(order.size - used),
    )
    return state.replace(slots=slots, pool=pool), pages_each


def parts_of_a_round(args: argparse.Namespace) -> dict:
    config = EngineConfig(
        max_num_seqs=args.slots,
        num_slots=args.slots,
        max_model_len=4096,
        num_pages=args.pages,
        token_budget=256,
    )
    full, pages_each = full_state(config, staggered=False)
    usual, _ = full_state(config, staggered=True)
    plan_of = jax.jit(partial(schedule, config))
    plan = plan_of(full)
    token_R, ok_R = jnp.full(args.slots, 7, jnp.int32), jnp.ones(args.slots, bool)
    after, _ = jax.jit(partial(allocate, config))(full, plan)
    if int(jnp.sum(after.slots.num_pages_S)) != args.slots * (pages_each + 1):
        raise ValueError("not every row was given a page")

    def one_round(state):
        state = admit(config, state)
        state, plan = allocate(config, state, schedule(config, state))
        return commit(config, state, plan, token_R, ok_R)

    def donating(function, state, *others):
        """The state is donated, as in the engine, so each call gets a copy."""
        program = jax.jit(function, donate_argnums=0)
        return partial(jax.tree.map, jnp.array, state), lambda copy: program(copy, *others)

    def nothing(state, plan):
        return state.replace(slots=state.slots.replace(status_S=state.slots.status_S + 1)), plan

    cases = {
        "the call itself": donating(nothing, full, plan),
        "schedule": donating(lambda state: (state, schedule(config, state)), full),
        "allocate, a page for each row": donating(partial(allocate, config), full, plan),
        "whole round": donating(one_round, usual),
    }
    times = medians_ms(cases, args.repeats, "parts")
    call_ms = times.pop("the call itself")  # the engine's rounds run in a loop, without it
    parts = {name: value - call_ms for name, value in times.items()}
    return {"slots": args.slots, "pages": args.pages, "call_ms": call_ms, "ms": parts}


def main() -> None:
    args = parse_args()
    result = {"benchmark": "scheduler", "label": "measured", **machine_facts()}
    result |= {"parts": parts_of_a_round(args), "share": share_of_a_step(args)}
    text = json.dumps(result)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
