"""What goes out with the next dispatch: order, room in slots and inbox, what is left for later."""

from dataclasses import replace

from engine.config import EngineConfig
from engine.dispatch import Choice, Fork
from engine.outbox import Outbox
from engine.sampling_params import SamplingParams
from engine.sampling_rows import RowFacts

CONFIG = EngineConfig(
    max_num_seqs=2, num_slots=3, max_model_len=16, num_pages=9, inbox_size=2, inbox_tokens=16
)


def choice(uid: int, length: int = 4, priority: int = 0) -> Choice:
    return Choice(
        request_id=str(uid),
        index=0,
        uid=uid,
        prompt_ids=[1] * length,
        params=SamplingParams(),
        facts=RowFacts(0),
        stop_ids=[],
        priority=priority,
        salt=0,
        max_len=16,
        parent_uid=-1,
        arrival_s=0.0,
    )


def sent(outbox: Outbox) -> list[int]:
    return [c.uid for c in outbox.take(1, 16).arrivals]


def test_the_queue_goes_by_priority_then_arrival_and_no_further_than_inbox_and_slots():
    outbox = Outbox(CONFIG)
    outbox.add([choice(0, priority=1), choice(1, priority=1)])
    outbox.add([choice(2), choice(3, priority=2), choice(4)])
    assert [sent(outbox) for _ in range(3)] == [[2, 4], [0], []]  # an inbox of 2, then 3 slots
    outbox.withdraw(outbox.out[4])
    assert [sent(outbox) for _ in range(2)] == [[1], []]
    assert list(outbox.out) == [2, 0, 1]
    assert [c.uid for c in outbox.queue] == [3]


def test_prompts_that_exceed_an_inbox_together_go_one_after_the_other():
    outbox = Outbox(CONFIG)
    outbox.add([choice(0, 9), choice(1, 8), choice(2, 1)])
    assert outbox.unanswered_tokens == 18
    assert [sent(outbox) for _ in range(2)] == [[0], [1, 2]]
    assert outbox.unanswered_tokens == 18
    outbox.out[0].token_ids.append(5)
    assert outbox.unanswered_tokens == 9


def test_a_long_queue_is_counted_until_it_fills_a_round():
    outbox = Outbox(replace(CONFIG, token_budget=10))
    outbox.add([choice(0, 9), choice(1, 8), choice(2, 7)])
    assert outbox.unanswered_tokens == 17


def test_only_what_was_sent_is_aborted_on_the_device_and_as_many_as_an_inbox_takes():
    outbox = Outbox(CONFIG)
    choices = [choice(uid) for uid in range(4)]
    outbox.add(choices)
    sent(outbox)
    sent(outbox)
    for each in choices:
        outbox.withdraw(each)
    assert outbox.aborts == [0, 1, 2]
    assert not outbox.out
    assert not outbox.queue
    assert outbox
    assert [outbox.take(1, 16).aborts for _ in range(3)] == [[0, 1], [2], []]
    assert not outbox


def test_forks_go_out_once():
    outbox = Outbox(CONFIG)
    outbox.forks.append(Fork(1, 0, 4, 7))
    assert [outbox.take(1, 16).forks for _ in range(2)] == [[Fork(1, 0, 4, 7)], []]


def test_scores_of_a_prompt_are_awaited_until_its_first_token():
    outbox, asks = Outbox(CONFIG), choice(0)
    asks.prompt_scores = [None] * 4
    outbox.add([asks, choice(1)])
    assert not outbox.awaits_prompt_scores
    sent(outbox)
    assert outbox.awaits_prompt_scores
    asks.token_ids.append(5)
    assert not outbox.awaits_prompt_scores
