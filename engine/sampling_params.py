"""What a request may ask of the sampler: names and defaults as users of vLLM know them.

Every value is checked when the object is made: a wrong type is a TypeError, a value out of range a
ValueError that names value, limit and fix. Bounds that depend on the model or on the engine's
capacities (token ids, number of biases) are checked by `engine.sampling_rows`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from engine.checks import check_flag, check_integer, check_number, plain_integers

MAX_CHOICES = 1024
MAX_TEMPERATURE = 100.0
MAX_BIAS = 100.0
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Lists are kept as tuples. See docs/sampling.md for the order in which the settings act.

    n                    choices per prompt; choice i does not depend on n
    presence_penalty     subtracted once from every token the output holds, -2 .. 2
    frequency_penalty    subtracted per occurrence in the output, -2 .. 2
    repetition_penalty   divides (if negative, multiplies) logits of tokens in prompt or output
    temperature          0 takes the most likely token
    top_p, top_k, min_p  keep the likeliest tokens: their mass, their number, their ratio to the top
    seed                 None draws a fresh one
    stop                 text that ends the output
    stop_token_ids       tokens that end the output, besides the end-of-sequence tokens
    ignore_eos           end-of-sequence tokens do not end the output
    max_tokens           None: as many as fit
    min_tokens           nothing ends the output before so many tokens exist
    logprobs             report the sampled token's log-probability and those of so many best
    prompt_logprobs      the same for prompt tokens
    detokenize           produce text
    skip_special_tokens  leave special tokens out of the text
    spaces_between_special_tokens  only True is supported
    include_stop_str_in_output     keep the stop string in the text
    truncate_prompt_tokens  keep only the last so many prompt tokens; -1: what the model takes
    logit_bias           token id -> addend in -100 .. 100, or -inf to forbid the token
    allowed_token_ids    only these can be chosen
    bad_words            texts that must not come about
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lengths()
        self._check_flags()
        plain_integers(self)
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        for name in ("stop_token_ids", "allowed_token_ids"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids is empty; name at least one id, or leave it None")
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need text; set detokenize=True or leave stop out")
        if self.is_greedy and self.n > 1:
            raise ValueError(
                f"n is {self.n} with temperature 0: all choices would be the same; use "
                "n=1 or a temperature above 0"
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def forbidding(self) -> list[str]:
        """Names of the settings in use that can forbid tokens."""
        names = ("allowed_token_ids", "logit_bias", "bad_words", "min_tokens")
        return [name for name in names if getattr(self, name)]

    def _check_numbers(self) -> None:
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, "0 is off")
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "0 is off")
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "1 is off")
        check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE, "0 is greedy")
        check_number("top_p", self.top_p, 0.0, 1.0, "1 is off", exclusive_low=True)
        check_number("min_p", self.min_p, 0.0, 1.0, "0 is off")
        check_integer("top_k", self.top_k, -1, None, "0 or -1 is off")
        check_integer("n", self.n, 1, MAX_CHOICES, "send several requests for more")
        if self.seed is not None:
            check_integer("seed", self.seed, 0, 2**64 - 1, "any of these will do")

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, None, "ask for one at least")
        check_integer("min_tokens", self.min_tokens, 0, None, "0 is off")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}; "
                "raise max_tokens or lower min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, None, "None is off")
        if self.truncate_prompt_tokens is not None:
            fix = "-1 keeps what the model takes, None is off"
            check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, None, fix)
            if self.truncate_prompt_tokens == 0:
                raise ValueError(f"truncate_prompt_tokens must not be 0; {fix}")

    def _check_flags(self) -> None:
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            check_flag(name, getattr(self, name))
        if not self.spaces_between_special_tokens:
            raise ValueError(
                "spaces_between_special_tokens=False is not supported; leave it True (text is what "
                "the tokenizer's own decoder gives)"
            )


def _texts(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        if name != "stop":
            raise TypeError(f"{name} must be a list of strings, got {value!r}; put it in a list")
        value = [value]
    if not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise TypeError(f"{name} must be a list of strings, got {value!r}")
    if not all(value):
        raise ValueError(f"{name} holds an empty string, which is everywhere; remove it")
    return tuple(dict.fromkeys(value))


def _ids(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list of token ids, got {value!r}")
    for token in value:
        check_integer(f"a token id of {name}", token, 0, MAX_TOKEN_ID, "use ids of the vocabulary")
    return tuple(dict.fromkeys(int(token) for token in value))


def _biases(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, got {value!r}")
    for token, bias in value.items():
        check_integer(
            "a token id of logit_bias", token, 0, MAX_TOKEN_ID, "use ids of the vocabulary"
        )
        if isinstance(bias, bool) or not isinstance(bias, Real) or bias != -math.inf:
            fix = "-inf forbids the token"
            check_number(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS, fix)
    return {int(token): float(bias) for token, bias in value.items()}
