"""Beam search: the `beam_width` best continuations of a prompt by total log-probability.

A prompt's beams are choices of one engine request. They move in lockstep: each runs one token, the
host reads the `2 * beam_width` likeliest next tokens of each, picks the best beams of them all and
tells every choice whose history to go on from (`engine.fork`). So beams share pages by reference,
and only written pages are copied. A beam that is early (another one was preempted, or waits for
pages) is held where it is.

Rules and scores are vLLM's: a beam ends where an end-of-sequence token is among its likeliest ones,
it leaves its place to the others, and the best of all that ended or reached `max_tokens` win. Equal
sums go to the better parent, then to the lower token id.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from engine.checks import check_flag, check_integer, check_kind, check_number, plain_integers
from engine.dispatch import Choice, Fork
from engine.engine import Engine
from engine.interrupts import interrupts_held_back
from engine.logprobs import NO_TOKEN, Logprobs
from engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class BeamSearchParams:
    """beam_width      beams kept per prompt, and sequences returned
    max_tokens      tokens a sequence gets at most
    ignore_eos      end-of-sequence tokens are tokens like others
    temperature     only 0 is supported: nothing is drawn
    length_penalty  scores are divided by (tokens of the whole sequence) ** length_penalty
    include_stop_str_in_output  keep the end-of-sequence token in `tokens`
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, 1, None, "1 is greedy")
        check_integer("max_tokens", self.max_tokens, 1, None, "a search needs an end")
        check_flag("ignore_eos", self.ignore_eos)
        check_flag("include_stop_str_in_output", self.include_stop_str_in_output)
        check_number("temperature", self.temperature, 0.0, 0.0, "beam search draws nothing")
        check_number("length_penalty", self.length_penalty, -10.0, 10.0, "0 is off")
        plain_integers(self)


@dataclass
class BeamSearchSequence:
    """`tokens` and `text` begin with the prompt. `finish_reason` is stop, length or error, and then
    `error` says why."""

    tokens: list[int]
    cum_logprob: float
    score: float
    finish_reason: str
    stop_reason: int | None = None
    text: str | None = None
    error: str | None = None


@dataclass
class BeamSearchOutput:
    """Best sequence first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True)
class Beam:
    """A sequence under way: its generated tokens and the sum of their log-probabilities."""

    tokens: tuple[int, ...] = ()
    cum_logprob: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """`beam` is beam number `parent` with one more token."""

    parent: int
    beam: Beam


def candidates(
    beams: Sequence[Beam], rows: Sequence[Logprobs], width: int, eos_ids: Collection[int]
) -> tuple[list[Candidate], list[Candidate]]:
    """(those that end, the `width` best that go on), from each beam's likeliest next tokens."""
    ends, goes_on = [], []
    for parent, (beam, row) in enumerate(zip(beams, rows, strict=True)):
        # Entry 0 is the token that the engine would have taken, one of the others.
        likeliest = slice(1, 1 + 2 * width)
        ids, values = row.ids_RL[likeliest].tolist(), row.logprobs_RL[likeliest].tolist()
        for token, logprob in zip(ids, values, strict=True):
            if token >= 0:
                grown = Beam((*beam.tokens, token), beam.cum_logprob + logprob)
                (ends if token in eos_ids else goes_on).append(Candidate(parent, grown))
    # Sorting keeps the order of equals: by parent, then by id.
    return ends, sorted(goes_on, key=lambda c: -c.beam.cum_logprob)[:width]


class Search:
    """One prompt's search: `step` after each lockstep of the engine, until `done`."""

    def __init__(self, engine: Engine, choices: Sequence[Choice], params: BeamSearchParams):
        self._engine, self._choices, self._params = engine, choices, params
        self._eos_ids = () if params.ignore_eos else engine.eos_token_ids
        self._prompt = choices[0].prompt_ids
        self._num_steps = choices[0].max_len - len(self._prompt)
        # Choice b runs beam b; choices beyond the live beams follow the best one.
        self._beams = [Beam()]
        self._rows: dict[int, Logprobs] = {}
        self._seen = [0] * len(choices)
        self._found: list[BeamSearchSequence] = []
        self.done = False

    def step(self) -> None:
        """Read what the choices reported; when all have, go on to the next token."""
        news = [b for b, c in enumerate(self._choices) if len(c.token_ids) > self._seen[b]]
        for b in news:
            choice = self._choices[b]
            self._seen[b] = len(choice.token_ids)
            self._rows.setdefault(b, choice.extras[-1])
        errors = [choice.error for choice in self._choices if choice.error]
        if errors:
            self._end(self._beams, "error", errors[0])
        elif self._all_here():
            self._grow()
        else:
            self._fork([(b, b, NO_TOKEN) for b in news])

    def _all_here(self) -> bool:
        live = range(len(self._beams))
        last = self._num_steps == len(self._beams[0].tokens) + 1
        in_slots = all(map(self._engine.has_slot, self._choices))
        return all(b in self._rows for b in live) and (last or in_slots)

    def _grow(self) -> None:
        rows = [self._rows[b] for b in range(len(self._beams))]
        ends, goes_on = candidates(self._beams, rows, len(self._choices), self._eos_ids)
        self._found += [self._sequence(c.beam, "stop") for c in ends]
        beams = [c.beam for c in goes_on]
        if not beams or len(beams[0].tokens) == self._num_steps:
            self._end(beams, "length")
            return
        followed = goes_on + goes_on[:1] * (len(self._choices) - len(goes_on))
        self._fork([(b, c.parent, c.beam.tokens[-1]) for b, c in enumerate(followed)])
        self._beams, self._rows = beams, {}

    def _fork(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """(choice, choice it goes on from, its next token; NO_TOKEN holds it) each."""
        length = len(self._prompt) + len(self._beams[0].tokens)
        self._engine.fork(
            [
                Fork(self._choices[b].uid, self._choices[source].uid, length, token)
                for b, source, token in moves
                if self._engine.has_slot(self._choices[b])
            ]
        )

    def _end(self, beams: Sequence[Beam], reason: str, error: str | None = None) -> None:
        self._found += [self._sequence(beam, reason, error) for beam in beams]
        self.close()

    def close(self) -> None:
        for choice in self._choices:
            if choice.finish_reason is None:
                self._engine.end(choice, "abort")
        self.done = True

    def _sequence(self, beam: Beam, reason: str, error: str | None = None) -> BeamSearchSequence:
        stopped = reason == "stop"
        length = len(self._prompt) + len(beam.tokens) - stopped
        kept = len(beam.tokens) - (stopped and not self._params.include_stop_str_in_output)
        return BeamSearchSequence(
            tokens=[*self._prompt, *beam.tokens[:kept]],
            cum_logprob=beam.cum_logprob,
            score=beam.cum_logprob / length**self._params.length_penalty,
            finish_reason=reason,
            stop_reason=beam.tokens[-1] if stopped else None,
            error=error,
        )

    def sequences(self) -> list[BeamSearchSequence]:
        best = sorted(self._found, key=operator.attrgetter("score"), reverse=True)
        return best[: len(self._choices)]


def run(
    engine: Engine,
    prompts: Sequence[tuple[list[int], int]],
    params: BeamSearchParams,
    request_id: Callable[[], str],
) -> Iterator[tuple[int, list[BeamSearchSequence]]]:
    """(number of the prompt, its sequences), as searches end; `prompts` are (ids, cache salt).

    All prompts are checked first. As many searches run side by side as surely fit.
    """
    sampling = _sampling(engine, params)
    costs = [_check(engine, i, ids, salt, sampling) for i, (ids, salt) in enumerate(prompts)]
    free_pages, free_rows = engine.config.num_pages - 1, engine.config.max_num_seqs
    waiting, running = list(range(len(prompts))), {}
    try:
        while waiting or running:
            while waiting and costs[waiting[0]] <= free_pages and params.beam_width <= free_rows:
                i = waiting.pop(0)
                ids, salt = prompts[i]
                with interrupts_held_back():
                    choices = engine.add_request(request_id(), ids, sampling, salt=salt)
                    running[i] = Search(engine, choices, params)
                free_pages, free_rows = free_pages - costs[i], free_rows - params.beam_width
            engine.step(lockstep=True)
            for i, search in list(running.items()):
                search.step()
                if search.done:
                    del running[i]
                    free_pages, free_rows = free_pages + costs[i], free_rows + params.beam_width
                    yield i, search.sequences()
    finally:
        for search in running.values():
            search.close()


def _sampling(engine: Engine, params: BeamSearchParams) -> SamplingParams:
    """The request behind a search: as many choices as beams, which draw nothing and never stop."""
    check_kind("params", params, BeamSearchParams, "BeamSearchParams")
    width, config = params.beam_width, engine.config
    for name, need, have in (
        ("max_num_seqs", width, config.max_num_seqs),
        ("max_logprobs", 2 * width, engine.limits.max_logprobs),
    ):
        if need > have:
            raise ValueError(
                f"beam_width {width} needs {name} {need}, the engine has {have}; use fewer beams "
                f"or raise {name}"
            )
    if config.policy != "continuous":
        raise ValueError(
            f"beam search needs the continuous scheduling_policy, the engine has {config.policy}"
        )
    return SamplingParams(
        n=width,
        top_k=1,
        max_tokens=params.max_tokens,
        ignore_eos=True,
        logprobs=2 * width,
        detokenize=False,
    )


def _check(engine: Engine, i: int, ids: list[int], salt: int, sampling: SamplingParams) -> int:
    """Pages with which the search of prompt i surely proceeds; ValueError if the pool has less.

    Beams share the full pages of the prompt and may share nothing else. Two pages each are for
    copies under way and for what admission keeps free.
    """
    try:
        max_len = engine.check(ids, sampling, salt=salt)
        size, width = engine.config.page_size, sampling.n
        shared = len(ids) // size
        need = shared + width * (-(-(max_len - 1) // size) - shared + 2)
        if need > engine.config.num_pages - 1:
            raise ValueError(
                f"{width} beams of {max_len} tokens need {need} pages of {size}, the pool has "
                f"{engine.config.num_pages - 1}; use more pages, fewer beams or fewer max_tokens"
            )
    except ValueError as error:
        raise ValueError(f"prompts[{i}]: {error}") from error
    return need
