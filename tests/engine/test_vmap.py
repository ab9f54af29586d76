"""The scheduler's functions under `vmap`: many engines side by side are each what it is alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from engine.admission import admit
from engine.commit import commit
from engine.inbox import receive
from engine.schedule import allocate, schedule
from engine.state import init_state, totals
from tests.compiling import QUICK
from tests.engine.driver import Request, make_inbox
from tests.engine.test_advance import STEMS, TIGHT

ENGINES = (
    ([Request(i, STEMS[0][: 6 + i], 30) for i in range(4)], []),  # a common prefix
    ([Request(9, STEMS[1], 40, priority=1), Request(12, STEMS[0][:9], 28)], [9]),
    ([Request(i, STEMS[1][: 5 * i + 1], 38) for i in range(4)], [2]),
    ([], []),
)


def serve(inbox, aborts, state):
    """30 rounds of a model whose token is the position; the aborts come in the tenth."""
    state = receive(state, inbox)

    def one_round(state, i):
        state = jax.lax.cond(i == 10, lambda: receive(state, aborts), lambda: state)
        state = admit(TIGHT, state)
        state, plan = allocate(TIGHT, state, schedule(TIGHT, state))
        token_R = plan.start_R + plan.q_len_R
        state, news = commit(TIGHT, state, plan, token_R, jnp.ones(token_R.shape, bool))
        return state, (news.token_R, news.uid_R, news.reason_R)

    return jax.lax.scan(one_round, state, jnp.arange(30))


def test_engines_side_by_side_are_each_as_alone():
    inputs = [
        (make_inbox(TIGHT, requests, []), make_inbox(TIGHT, [], aborts))
        for requests, aborts in ENGINES
    ]
    states = [init_state(TIGHT, None) for _ in ENGINES]
    compiled = partial(jax.jit, compiler_options=QUICK)
    one = compiled(serve)
    alone = [one(*pair, state) for pair, state in zip(inputs, states, strict=True)]
    stacked = (
        jax.tree.map(lambda *x: jnp.stack(x), *inputs),
        jax.tree.map(lambda *x: jnp.stack(x), *states),
    )
    together = compiled(jax.vmap(lambda pair, state: serve(*pair, state)))(*stacked)
    assert totals(alone[2][0])["preemptions"] > 0
    for e, wanted in enumerate(alone):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[e], y), together, wanted)  # noqa: B023
