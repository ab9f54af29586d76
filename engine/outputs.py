"""What callers get back: the shapes that users of vLLM know."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """`rank` is 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One choice. `finish_reason` is None while it runs, then stop, length, error or abort.

    `stop_reason` is the stop string or stop token id that ended it, None for an end-of-sequence
    token; `error` says why it ended with an error. `logprobs` has one mapping from token id per
    token, if they were asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(frozen=True)
class RequestTimes:
    """Seconds on the host's monotonic clock, None for what never came.

    `started_s` is the start of the dispatch that first computed a token of the request, which is
    when it was sent or, if the dispatch before it was read later than that, then.
    """

    arrival_s: float
    started_s: float | None
    first_token_s: float | None
    last_token_s: float | None


@dataclass
class RequestOutput:
    """One prompt and its choices.

    `prompt_logprobs`, if asked for, has one mapping from token id per prompt token, None for the
    first one; it is None until the whole prompt is computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    seed: int
    times: RequestTimes | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
