"""From tokens of one choice to its text: detokenise, find stop strings, collect log-probabilities.

Tokens are taken one by one, so the text, the token ids and the log-probabilities all end at the
token that completes a stop, however many tokens a dispatch brought.
"""

from collections.abc import Sequence

from engine.dispatch import Choice
from engine.logprobs import Logprobs
from engine.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimes
from engine.stop_strings import StopStrings
from engine.tokenizer import Tokenizer


class TextChoice:
    """Follows a `Choice`; `output` is what the caller sees so far."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer | None):
        params = choice.params
        self.choice, self.params = choice, params
        self.output = CompletionOutput(choice.index)
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self._tokenizer = tokenizer
        self._detokenizer = None
        if params.detokenize and tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)

    @property
    def has_news(self) -> bool:
        """Whether `take` would change the output."""
        more = len(self.choice.token_ids) > len(self.output.token_ids)
        return self.output.finish_reason is None and (more or self.choice.finish_reason is not None)

    def take(self) -> str:
        """Read the choice's new tokens; the new text. Sets a finish reason when one is reached."""
        output, choice, delta = self.output, self.choice, ""
        for position in range(len(output.token_ids), len(choice.token_ids)):
            token = choice.token_ids[position]
            output.token_ids.append(token)
            if self.params.logprobs is not None:
                found = logprobs_by_id(
                    choice.extras[position], self.params.logprobs, self._tokenizer
                )
                output.logprobs.append(found)
                output.cumulative_logprob += found[token].logprob
            last = position + 1 == len(choice.token_ids) and choice.finish_reason is not None
            delta += self._add_text(token, ends=last)
            if self._stops.stopped is not None:
                output.finish_reason, output.stop_reason = "stop", self._stops.stopped
                break
        if output.finish_reason is None and choice.finish_reason is not None:
            delta += self._end()
        output.text += delta
        return delta

    def _add_text(self, token: int, ends: bool) -> str:
        if self._detokenizer is None:
            return ""
        ends_by_it = ends and self.choice.finish_reason == "stop"
        own_stop = ends_by_it and token in (self.params.stop_token_ids or ())
        if own_stop and not self.params.include_stop_str_in_output:
            return ""
        may_stop = len(self.output.token_ids) > self.params.min_tokens
        return self._stops.add(self._detokenizer.push([token]), may_stop=may_stop)

    def _end(self) -> str:
        output, choice, text = self.output, self.choice, ""
        if self._detokenizer is not None:
            text = self._stops.add(self._detokenizer.finish()) + self._stops.finish()
        if self._stops.stopped is not None:
            output.finish_reason, output.stop_reason = "stop", self._stops.stopped
            return text
        output.finish_reason, output.error = choice.finish_reason, choice.error
        if choice.finish_reason == "stop":
            last = choice.token_ids[-1]
            output.stop_reason = last if last in (self.params.stop_token_ids or ()) else None
        return text


class RequestText:
    """Follows the choices of one request."""

    def __init__(self, prompt: str | None, choices: Sequence[Choice], tokenizer: Tokenizer | None):
        self.prompt, self._tokenizer = prompt, tokenizer
        self.texts = [TextChoice(choice, tokenizer) for choice in choices]
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        choice = self.texts[0].choice
        scores = choice.prompt_scores
        if self._prompt_logprobs is None and scores and None not in scores[1:]:
            wanted = choice.params.prompt_logprobs
            self._prompt_logprobs = [
                None if row is None else logprobs_by_id(row, wanted, self._tokenizer)
                for row in scores
            ]
        return self._prompt_logprobs

    @property
    def finished(self) -> bool:
        return all(text.output.finish_reason for text in self.texts)

    def output(self, request_id: str) -> RequestOutput:
        choices = [text.choice for text in self.texts]
        starts = [c.started_s for c in choices if c.started_s is not None]
        firsts = [c.first_token_s for c in choices if c.first_token_s is not None]
        lasts = [c.last_token_s for c in choices if c.last_token_s is not None]
        return RequestOutput(
            request_id=request_id,
            prompt=self.prompt,
            prompt_token_ids=choices[0].prompt_ids,
            outputs=[text.output for text in self.texts],
            finished=self.finished,
            seed=choices[0].facts.seed,
            times=RequestTimes(
                choices[0].arrival_s,
                min(starts, default=None),
                min(firsts, default=None),
                max(lasts, default=None),
            ),
            prompt_logprobs=self.prompt_logprobs,
        )


def logprobs_by_id(row: Logprobs, num_best: int, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """One row of `engine.logprobs`: the token itself, then the `num_best` best ones in order."""
    wanted = 1 + num_best
    found: dict[int, Logprob] = {}
    entries = zip(row.ids_RL[:wanted].tolist(), row.logprobs_RL[:wanted].tolist(), strict=True)
    for place, (token_id, value) in enumerate(entries):
        if token_id >= 0 and token_id not in found:
            rank = int(row.rank_R) if place == 0 else place
            text = "" if tokenizer is None else tokenizer.decode([token_id], False)
            found[token_id] = Logprob(value, rank, text)
    return found
