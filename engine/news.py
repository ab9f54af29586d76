"""What a dispatch brought, handed to the choices it is of.

In: an emission that has come back, and the choices that are out, by uid. Out: tokens, what was
sampled beside them and prompt scores, in the choices; and which of them ended. Invariant: rows of
choices that were aborted meanwhile are passed over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from engine.commit import Emission
from engine.dispatch import Choice, Update
from engine.state import NO_UID, REASONS
from engine.step import PromptScores


@dataclass(frozen=True)
class News:
    """Rows of each round, on the host; `live_QR` are those of choices that are out."""

    token_QR: np.ndarray
    uid_QR: np.ndarray
    reason_QR: np.ndarray
    sampled_QR: Any
    live_QR: np.ndarray

    @property
    def num_rounds(self) -> int:
        return int(self.live_QR.any(axis=1).sum())

    @property
    def num_tokens(self) -> int:
        return int((self.live_QR & (self.token_QR >= 0)).sum())


def read_news(emitted: Emission, out: Mapping[int, Choice]) -> News:
    token_QR, uid_QR, reason_QR = map(
        np.asarray, (emitted.token_R, emitted.uid_R, emitted.reason_R)
    )
    sampled_QR = jax.tree.map(np.asarray, emitted.extra.sampled)
    return News(token_QR, uid_QR, reason_QR, sampled_QR, np.isin(uid_QR, list(out)))


def tell(
    news: News, out: Mapping[int, Choice], started_s: float, returned_s: float
) -> list[Update]:
    """Give each choice its tokens; times are those of the dispatch. An end is an update too."""
    updates: dict[int, Update] = {}
    for q, r in np.argwhere(news.live_QR):
        choice = out[int(news.uid_QR[q, r])]
        if choice.started_s is None:
            choice.started_s = started_s
        if news.token_QR[q, r] >= 0:
            choice.token_ids.append(int(news.token_QR[q, r]))
            choice.extras.append(jax.tree.map(lambda x: x[q, r], news.sampled_QR))  # noqa: B023
            if choice.first_token_s is None:
                choice.first_token_s = returned_s
            choice.last_token_s = returned_s
            before = updates.get(choice.uid, Update(choice, 0))
            updates[choice.uid] = Update(choice, before.num_new + 1)
        if news.reason_QR[q, r]:
            updates.setdefault(choice.uid, Update(choice, 0))
    return list(updates.values())


def ends(news: News, out: Mapping[int, Choice]) -> list[tuple[Choice, str]]:
    """The choices that ended, and why."""
    ended_QR = news.live_QR & (news.reason_QR > 0)
    rows = zip(news.uid_QR[ended_QR].tolist(), news.reason_QR[ended_QR].tolist(), strict=True)
    return [(out[uid], REASONS[reason]) for uid, reason in rows]


def tell_prompt_scores(prompt: PromptScores, out: Mapping[int, Choice]) -> None:
    prompt = jax.tree.map(np.asarray, prompt)
    for q, t in np.argwhere(prompt.uid_T != NO_UID):
        choice = out.get(int(prompt.uid_T[q, t]))
        if choice is not None:
            score = jax.tree.map(lambda x: x[q, t], prompt.scores_T)  # noqa: B023
            choice.prompt_scores[prompt.position_T[q, t]] = score
