"""What a dispatch brought, handed out: tokens in order, ends, times, prompt scores."""

import numpy as np

from engine.commit import Emission
from engine.news import ends, read_news, tell, tell_prompt_scores
from engine.state import LENGTH, NO_TOKEN, NO_UID, STOP
from engine.step import Extra, PromptScores
from tests.engine.test_outbox import choice


def emission() -> Emission:
    """Three rounds of three rows: request 0 goes on, 1 ends in the second round, 2 was aborted."""
    return Emission(
        token_R=np.array([[10, 20, 30], [11, 21, 31], [12, NO_TOKEN, 32]]),
        uid_R=np.array([[0, 1, 2], [0, 1, 2], [0, NO_UID, 2]]),
        reason_R=np.array([[0, 0, 0], [0, STOP, 0], [0, 0, LENGTH]]),
        extra=Extra({"rank": np.arange(9).reshape(3, 3)}, None),
    )


def test_each_choice_gets_its_tokens_in_order_and_its_end():
    out = {0: choice(0), 1: choice(1)}
    news = read_news(emission(), out)
    assert (news.num_rounds, news.num_tokens) == (3, 5)
    updates = tell(news, out, 1.0, 2.0)
    assert [(u.choice.uid, u.num_new) for u in updates] == [(0, 3), (1, 2)]
    assert [c.token_ids for c in out.values()] == [[10, 11, 12], [20, 21]]
    assert [[int(e["rank"]) for e in c.extras] for c in out.values()] == [[0, 3, 6], [1, 4]]
    assert ends(news, out) == [(out[1], "stop")]


def test_times_are_those_of_the_dispatches_that_brought_first_and_last():
    out = {0: choice(0)}
    for started_s in (1.0, 5.0):
        tell(read_news(emission(), out), out, started_s, started_s + 1)
    times = out[0].times
    assert (times.started_s, times.first_token_s, times.last_token_s) == (1.0, 2.0, 6.0)


def test_an_end_without_a_token_is_news():
    out = {5: choice(5)}
    end = Emission(*(np.array([[x]]) for x in (NO_TOKEN, 5, 3)), extra=Extra(None, None))
    news = read_news(end, out)
    (update,) = tell(news, out, 1.0, 2.0)
    assert (update.num_new, out[5].token_ids) == (0, [])
    assert ends(news, out) == [(out[5], "error")]
    assert out[5].first_token_s is None


def test_prompt_scores_go_to_their_positions():
    out = {0: choice(0), 1: choice(1)}
    for each in out.values():
        each.prompt_scores = [None] * 4
    scores = PromptScores(
        uid_T=np.array([[0, 0, 1, 7, NO_UID]]),
        position_T=np.array([[1, 2, 3, 1, 0]]),
        scores_T=np.arange(5)[None],
    )
    tell_prompt_scores(scores, out)
    assert out[0].prompt_scores == [None, 0, 1, None]
    assert out[1].prompt_scores == [None, None, None, 2]
