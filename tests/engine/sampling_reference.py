"""The sampler once more, a row at a time in float64, by sorting; and ways to run the real one."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from engine.logit_edits import edit_logits
from engine.sampling import sample
from engine.sampling_params import SamplingParams
from engine.sampling_rows import RowFacts, SamplingLimits, empty_rows, fill_row
from engine.state import empty_requests
from engine.step import RowView

LIMITS = SamplingLimits(
    vocab_size=12,
    max_logprobs=4,
    max_logit_bias=4,
    max_allowed_ids=4,
    max_bad_words=3,
    max_bad_word_len=3,
)
ROWS, ROOM = 8, 32  # of a batch of cases; tokens a slot has room for
MAX_STOP_IDS = 3


@dataclass
class Case:
    """One row: its logits, what was asked, what is known so far."""

    logits: Sequence[float]
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: Sequence[int] = (0,)
    output: Sequence[int] = ()
    seed: int = 0
    choice: int = 0
    stop_ids: Sequence[int] = ()
    bad_word_ids: Sequence[Sequence[int]] = ()


def arrays(cases: Sequence[Case], slots: Sequence[int] | None = None):
    """(view, logits_RV, samples_R) of at most ROWS cases, row r in slot `slots[r]`.

    Rows without a case and slots without a row hold junk.
    """
    slots = range(len(cases)) if slots is None else slots
    rows = empty_rows(ROWS, LIMITS)
    requests = empty_requests(ROWS, MAX_STOP_IDS, rows)
    tokens_SX = np.full((ROWS, ROOM), 5, np.int32)  # a real id
    slot_R = np.full(ROWS, ROWS, np.int32)
    num_tokens_R = np.zeros(ROWS, np.int32)
    logits_RV = np.full((ROWS, LIMITS.vocab_size), np.nan, np.float32)
    for r, (case, slot) in enumerate(zip(cases, slots, strict=True)):
        facts = RowFacts(case.seed, case.choice, case.bad_word_ids)
        fill_row(requests.sampling, r, case.params, facts, LIMITS)
        requests.stop_ids[r, : len(case.stop_ids)] = case.stop_ids
        requests.prompt_len[r] = len(case.prompt)
        known = [*case.prompt, *case.output]
        slot_R[r], num_tokens_R[r] = slot, len(known)
        tokens_SX[slot, : len(known)] = known
        logits_RV[r] = -np.inf
        logits_RV[r, : len(case.logits)] = case.logits
    view = RowView(
        requests_R=requests, slot_R=slot_R, num_tokens_R=num_tokens_R, tokens_SX=tokens_SX
    )
    return view, logits_RV, np.arange(ROWS) < len(cases)


compiled_sample = jax.jit(sample, static_argnums=0)
compiled_edit = jax.jit(edit_logits)


def run(cases: Sequence[Case], slots: Sequence[int] | None = None, dtype=jnp.float32):
    """`sample` on the cases, as numpy."""
    view, logits_RV, samples_R = arrays(cases, slots)
    out = compiled_sample(LIMITS, view, jnp.asarray(logits_RV, dtype), samples_R)
    return jax.tree.map(lambda x: np.asarray(x)[: len(cases)], out)


def run_edits(cases: Sequence[Case]) -> list[np.ndarray]:
    """`edit_logits` on the cases."""
    view, logits_RV, _ = arrays(cases)
    edited_RV, _ = compiled_edit(logits_RV, view.requests_R.sampling, view)
    return [np.asarray(x)[: len(c.logits)] for c, x in zip(cases, edited_RV, strict=False)]


def draws(case: Case, count: int) -> np.ndarray:
    """Tokens of `count` rows that differ in their seed only: 0, 1, ..."""
    rows = empty_rows(1, LIMITS)
    fill_row(rows, 0, case.params, RowFacts(0, case.choice, case.bad_word_ids), LIMITS)
    logits_V = np.full(LIMITS.vocab_size, -np.inf, np.float32)
    logits_V[: len(case.logits)] = case.logits
    known = np.array([*case.prompt, *case.output], np.int32)
    stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
    stop_ids[: len(case.stop_ids)] = case.stop_ids
    history = known, len(case.prompt), stop_ids
    return np.asarray(_draws(count, LIMITS, logits_V, rows, history))


@partial(jax.jit, static_argnums=(0, 1))
def _draws(count, limits, logits_V, rows, history):
    known, prompt_len, stop_ids = history
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape[1:])), rows)
    seed = jnp.stack([jnp.zeros(count, jnp.uint32), jnp.arange(count, dtype=jnp.uint32)], axis=1)
    requests = empty_requests(count, MAX_STOP_IDS, rows.replace(seed=seed))
    requests = requests.replace(
        prompt_len=jnp.full(count, prompt_len),
        stop_ids=jnp.broadcast_to(stop_ids, (count, stop_ids.size)),
    )
    view = RowView(
        requests_R=requests,
        slot_R=jnp.zeros(count, jnp.int32),
        num_tokens_R=jnp.full(count, known.size),
        tokens_SX=known[None],
    )
    logits_RV = jnp.broadcast_to(logits_V, (count, logits_V.size))
    return sample(limits, view, logits_RV, jnp.ones(count, bool)).token_R


# ---- the reference -------------------------------------------------------------------------------


def edited(case: Case) -> np.ndarray:
    """Logits after bias, allowed ids, bad words, min_tokens and penalties, float64."""
    x, params = np.array(case.logits, np.float64), case.params
    known, output = [*case.prompt, *case.output], list(case.output)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if params.allowed_token_ids is not None:
        x[[v for v in range(len(x)) if v not in params.allowed_token_ids]] = -np.inf
    for word in case.bad_word_ids:
        *before, last = word
        if known[len(known) - len(before) :] == before:
            x[last] = -np.inf
    if len(output) < params.min_tokens:
        x[list(case.stop_ids)] = -np.inf
    for token in set(known):
        x[token] *= 1 / params.repetition_penalty if x[token] > 0 else params.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= params.presence_penalty + count * params.frequency_penalty
    return x


def kept(weights, min_p=0.0, top_k=0, top_p=1.0, slack=2.0**-20) -> list[int]:
    """Ids the filters leave, likeliest first, ties by id."""
    order = sorted(range(len(weights)), key=lambda v: (-weights[v], v))
    order = [v for v in order if weights[v] >= min_p * max(weights) and weights[v] > 0]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        mass, total = 0.0, sum(weights[v] for v in order)
        for i, v in enumerate(order):
            mass += weights[v]
            if mass >= (top_p - slack) * total:
                return order[: i + 1]
    return order


def distribution(case: Case) -> np.ndarray:
    """Probability of every token."""
    x, params = edited(case), case.params
    if params.temperature == 0 or params.top_k == 1:
        return np.eye(len(x))[int(np.argmax(x))]
    weights = np.exp((x - x.max()) / params.temperature)
    ids = kept(weights.tolist(), params.min_p, params.top_k, params.top_p)
    p = np.zeros(len(x))
    p[ids] = weights[ids]
    return p / p.sum()
