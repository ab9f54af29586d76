"""Generation for a fixed set of prompts: the plain loop over the ragged forward pass.

Prompts prefill in chunks of a few fixed widths, then all rows decode together, several steps per
dispatch, with the next dispatch sent before the last one's tokens are read. Slot s of one call
keeps its cache for the next call: a prompt that begins with what slot s already holds (the next
turn of a conversation) computes only its new tokens.

Invariant: `Rows.kv_len_S` tokens of each slot are in the cache; the last known token is not.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from engine.sampling import sample_rows
from models.batch import ragged_batch
from models.config import ModelConfig
from models.kv_cache import KVCache, init_cache, kv_bytes_per_token, num_pages_for
from models.model import ModelParams, cache_specs, forward, unembed

NO_TOKEN = -1


@dataclass(frozen=True)
class GenerateConfig:
    """Static settings. `prefill_widths` are the token widths compiled for prompts, ascending."""

    max_num_seqs: int = 1
    max_model_len: int = 2048
    page_size: int = 16
    prefill_widths: tuple[int, ...] = (16, 64, 256)
    steps_per_dispatch: int = 8
    min_rows: int = 1
    attention_impl: str = "auto"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "page_size", "steps_per_dispatch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy. Each prompt of a call draws from `seed` + its index."""

    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in 0 .. 2**32-1, got {self.seed}")


@struct.dataclass
class Rows:
    """Per-slot state on device. token_S: last known token; left_S: tokens it may still produce."""

    token_S: jax.Array
    kv_len_S: jax.Array
    prompt_len_S: jax.Array
    left_S: jax.Array
    temperature_S: jax.Array
    seed_S: jax.Array
    page_table_SM: jax.Array
    eos_E: jax.Array


@dataclass(frozen=True)
class Emitted:
    """New tokens of one prompt, in order. `finish_reason` is None while it runs."""

    index: int
    token_ids: list[int]
    finish_reason: str | None


def _commit(rows: Rows, token_S: jax.Array, emits_S: jax.Array) -> tuple[Rows, jax.Array]:
    """Take the sampled token where `emits_S`; an end-of-sequence token ends its row."""
    ended_S = jnp.any(token_S[:, None] == rows.eos_E[None, :], axis=-1)
    left_S = jnp.where(ended_S, 0, rows.left_S - 1)
    rows = rows.replace(
        token_S=jnp.where(emits_S, token_S, rows.token_S),
        left_S=jnp.where(emits_S, left_S, rows.left_S),
    )
    return rows, jnp.where(emits_S, token_S, NO_TOKEN)


def _sample(config, params, hidden_SD, rows: Rows) -> jax.Array:
    logits_SV = unembed(config, params, hidden_SD)
    output_index_S = rows.kv_len_S - rows.prompt_len_S
    return sample_rows(logits_SV, rows.temperature_S, rows.seed_S, output_index_S)


@partial(jax.jit, static_argnames=("config", "attention_impl"), donate_argnames=("cache", "rows"))
def prefill_chunk(
    config: ModelConfig,
    params: ModelParams,
    cache: KVCache,
    rows: Rows,
    tokens_T: jax.Array,
    q_len_S: jax.Array,
    *,
    attention_impl: str,
) -> tuple[KVCache, Rows, jax.Array]:
    """One chunk of prompt tokens of any slots; slots whose prompt is now whole emit a token."""
    q_start_S = jnp.cumsum(q_len_S) - q_len_S
    rows = rows.replace(kv_len_S=rows.kv_len_S + q_len_S)
    batch = ragged_batch(
        tokens_T,
        q_start_S,
        q_len_S,
        rows.kv_len_S,
        rows.prompt_len_S,
        rows.page_table_SM,
        max_q_len=tokens_T.shape[0],
    )
    hidden_TD, cache = forward(config, params, cache, batch, attention_impl=attention_impl)
    last_S = jnp.maximum(q_start_S + q_len_S - 1, 0)
    token_S = _sample(config, params, hidden_TD.at[last_S].get(mode="clip"), rows)
    emits_S = (q_len_S > 0) & (rows.kv_len_S == rows.prompt_len_S)
    rows, emitted_S = _commit(rows, token_S, emits_S)
    return cache, rows, emitted_S


@partial(
    jax.jit,
    static_argnames=("config", "max_steps", "min_rows", "attention_impl"),
    donate_argnames=("cache", "rows"),
)
def decode_steps(
    config: ModelConfig,
    params: ModelParams,
    cache: KVCache,
    rows: Rows,
    *,
    max_steps: int,
    min_rows: int,
    attention_impl: str,
) -> tuple[KVCache, Rows, jax.Array]:
    """Up to `max_steps` tokens for every unfinished row; emitted [max_steps, S], -1 where none."""
    num_slots = rows.token_S.shape[0]
    q_start_S = jnp.arange(num_slots, dtype=jnp.int32)
    padding = max(min_rows - num_slots, 0)

    def step(carry):
        i, cache, rows, emitted_KS = carry
        active_S = rows.left_S > 0
        q_len_S = active_S.astype(jnp.int32)
        rows = rows.replace(kv_len_S=rows.kv_len_S + q_len_S)
        batch = ragged_batch(
            jnp.pad(rows.token_S, (0, padding)),
            q_start_S,
            q_len_S,
            rows.kv_len_S,
            rows.prompt_len_S,
            rows.page_table_SM,
            max_q_len=1,
        )
        hidden_TD, cache = forward(config, params, cache, batch, attention_impl=attention_impl)
        # The padding row stays in: a bfloat16 matmul of one row is slow on CPU.
        padded = rows.replace(
            kv_len_S=jnp.pad(rows.kv_len_S, (0, padding)),
            prompt_len_S=jnp.pad(rows.prompt_len_S, (0, padding)),
            temperature_S=jnp.pad(rows.temperature_S, (0, padding)),
            seed_S=jnp.pad(rows.seed_S, (0, padding)),
        )
        token_S = _sample(config, params, hidden_TD, padded)[:num_slots]
        rows, emitted_S = _commit(rows, token_S, active_S)
        return i + 1, cache, rows, emitted_KS.at[i].set(emitted_S, mode="drop")

    def unfinished(carry):
        i, _, rows, _ = carry
        return (i < max_steps) & jnp.any(rows.left_S > 0)

    emitted_KS = jnp.full((max_steps, num_slots), NO_TOKEN, jnp.int32)
    _, cache, rows, emitted_KS = jax.lax.while_loop(unfinished, step, (0, cache, rows, emitted_KS))
    return cache, rows, emitted_KS


class Generator:
    """Holds parameters, cache and what each slot's cache contains; see the module docstring."""

    def __init__(
        self,
        config: ModelConfig,
        params: ModelParams,
        settings: GenerateConfig,
        *,
        num_pages: int | None = None,
        memory_bytes: int | None = None,
        memory_fraction: float = 0.9,
    ):
        """`num_pages` None: as many as `max_num_seqs` full sequences need (plus the trash page).

        Either way the pages must fit in `memory_fraction` of `memory_bytes`, when that is given.
        """
        if settings.max_model_len > config.max_position:
            raise ValueError(
                f"max_model_len {settings.max_model_len} exceeds the model's limit of "
                f"{config.max_position} positions"
            )
        self.config, self.params, self.settings = config, params, settings
        self.dtype = params.embed_VD.dtype
        specs = cache_specs(config)
        need = settings.max_num_seqs * settings.pages_per_seq + 1
        num_pages = need if num_pages is None else num_pages
        if memory_bytes is not None:
            limit = num_pages_for(
                specs, settings.page_size, self.dtype, memory_bytes, memory_fraction
            )
            if num_pages > limit:
                page_bytes = settings.page_size * kv_bytes_per_token(specs, self.dtype)
                raise ValueError(
                    f"{num_pages} pages of {page_bytes:,} bytes do not fit: {memory_fraction:.0%} "
                    f"of {memory_bytes:,} free bytes holds {limit}; use fewer or shorter "
                    "sequences, fewer pages or a smaller dtype"
                )
        self.num_pages = num_pages
        self._cache = init_cache(specs, num_pages, settings.page_size, self.dtype)
        self._programs: dict[str, jax.stages.Compiled] = {}
        self.compile_s = 0.0
        self.reused_tokens = 0
        self._held: list[list[int]] = [[] for _ in range(settings.max_num_seqs)]
        self._pages: list[list[int]] = [[] for _ in range(settings.max_num_seqs)]

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> Iterator[list[Emitted]]:
        """Yield new tokens as dispatches come back, at most one `Emitted` per prompt each time.

        Finish reasons: `stop` (end-of-sequence token, included) or `length` (`max_tokens`, or
        `max_model_len` reached first).
        """
        limits = [self._check(i, prompt, sampling) for i, prompt in enumerate(prompts)]
        if not 1 <= len(prompts) <= self.settings.max_num_seqs:
            raise ValueError(
                f"{len(prompts)} prompts for {self.settings.max_num_seqs} slots; give 1 to "
                f"{self.settings.max_num_seqs} at a time"
            )
        self._allocate(prompts, limits)
        return self._run([list(p) for p in prompts], limits, sampling)

    def _check(self, index: int, prompt: Sequence[int], sampling: Sampling) -> int:
        limit, vocab = self.settings.max_model_len, self.config.vocab_size
        if not prompt:
            raise ValueError(f"prompt {index} is empty; give at least one token")
        if len(prompt) + 1 > limit:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with one token to generate that exceeds "
                f"the limit of {limit}; shorten it"
                + ("" if limit == self.config.max_position else " or raise max_model_len")
            )
        for token in prompt:
            if not 0 <= token < vocab:
                raise ValueError(f"prompt {index} holds token id {token}, outside 0 .. {vocab - 1}")
        return min(sampling.max_tokens, limit - len(prompt))

    def _allocate(self, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        """Give each slot the pages its whole request needs; pages a slot holds stay its own."""
        size = self.settings.page_size
        need = [-(-(len(p) + n) // size) for p, n in zip(prompts, limits, strict=True)]
        for slot in range(len(prompts), len(self._pages)):
            self._pages[slot], self._held[slot] = [], []
        total = sum(max(n, len(have)) for n, have in zip(need, self._pages, strict=False))
        if total > self.num_pages - 1:
            self._pages = [[] for _ in self._pages]
            self._held = [[] for _ in self._held]
            if sum(need) > self.num_pages - 1:
                raise ValueError(
                    f"the prompts need {sum(need)} pages of {size} tokens, the cache has "
                    f"{self.num_pages - 1}; use more pages, fewer prompts or a smaller max_tokens"
                )
        taken = {page for pages in self._pages for page in pages}
        free = iter([page for page in range(1, self.num_pages) if page not in taken])
        for slot, n in enumerate(need):
            self._pages[slot] += [next(free) for _ in range(n - len(self._pages[slot]))]

    def _run(self, prompts, limits, sampling: Sampling) -> Iterator[list[Emitted]]:
        rows, starts = self._rows(prompts, limits, sampling)
        stream = _Stream(prompts, limits, self._eos(sampling))
        cache, settings = self._cache, self.settings
        self._held = [[] for _ in self._held]  # nothing is reusable until this run has ended
        decode = self._decode_program(cache, rows)
        firsts = []
        for tokens_T, q_len_S in _chunks(prompts, starts, settings):
            prefill = self._prefill_program(cache, rows, tokens_T, q_len_S)
            cache, rows, emitted_S = prefill(self.params, cache, rows, tokens_T, q_len_S)
            firsts.append(emitted_S)
        self._cache = cache
        for emitted_S in firsts:
            if news := stream.take(np.asarray(emitted_S)[None]):
                yield news
        waiting = None
        while not stream.finished:
            # One dispatch is in flight while the one before it is read.
            cache, rows, emitted_KS = decode(self.params, cache, rows)
            self._cache = cache
            if waiting is not None and (news := stream.take(np.asarray(waiting))):
                yield news
            waiting = emitted_KS
        self._held = stream.held(self._held)

    def _decode_program(self, cache: KVCache, rows: Rows) -> jax.stages.Compiled:
        settings = self.settings
        return self._compiled(
            "decode",
            decode_steps,
            (cache, rows),
            max_steps=settings.steps_per_dispatch,
            min_rows=settings.min_rows,
        )

    def _prefill_program(self, cache, rows, tokens_T, q_len_S) -> jax.stages.Compiled:
        name = f"prefill {len(tokens_T)}"
        return self._compiled(name, prefill_chunk, (cache, rows, tokens_T, q_len_S))

    def _compiled(self, name: str, program, arguments, **static) -> jax.stages.Compiled:
        """One program per token width, compiled when first needed; shapes never vary after."""
        if name not in self._programs:
            start = time.perf_counter()
            lowered = program.lower(
                self.config,
                self.params,
                *arguments,
                attention_impl=self.settings.attention_impl,
                **static,
            )
            self._programs[name] = lowered.compile()
            self.compile_s += time.perf_counter() - start
        return self._programs[name]

    def _eos(self, sampling: Sampling) -> tuple[int, ...]:
        return () if sampling.ignore_eos else tuple(self.config.eos_token_ids)

    def _rows(self, prompts, limits, sampling: Sampling) -> tuple[Rows, list[int]]:
        S, M = self.settings.max_num_seqs, self.settings.pages_per_seq
        starts = [
            min(_common_prefix(prompt, held), len(prompt) - 1)
            for prompt, held in zip(prompts, self._held, strict=False)
        ]
        self.reused_tokens = sum(starts)
        table_SM = np.zeros((S, M), np.int32)
        for slot, pages in enumerate(self._pages):
            table_SM[slot, : min(len(pages), M)] = pages[:M]

        def column(values, dtype=np.int32):
            full = np.zeros(S, dtype)
            full[: len(values)] = values
            return jnp.asarray(full)

        n = len(prompts)
        return Rows(
            token_S=column([]),
            kv_len_S=column(starts),
            prompt_len_S=column([len(p) for p in prompts]),
            left_S=column(limits),
            temperature_S=column([sampling.temperature] * n, np.float32),
            seed_S=column([(sampling.seed + i) % 2**32 for i in range(n)], np.uint32),
            page_table_SM=jnp.asarray(table_SM),
            eos_E=jnp.asarray(np.array(self._eos(sampling) or (NO_TOKEN,), np.int32)),
        ), starts


class _Stream:
    """What has been emitted so far, and which prompts have ended and why."""

    def __init__(self, prompts, limits, eos: tuple[int, ...]):
        self.prompts, self.limits, self.eos = prompts, limits, set(eos)
        self.outputs: list[list[int]] = [[] for _ in prompts]
        self.reasons: list[str | None] = [None] * len(prompts)

    @property
    def finished(self) -> bool:
        return all(self.reasons)

    def take(self, emitted_KS: np.ndarray) -> list[Emitted]:
        news = []
        for i in range(len(self.prompts)):
            tokens = [int(t) for t in emitted_KS[:, i] if t != NO_TOKEN]
            if not tokens:
                continue
            self.outputs[i] += tokens
            if tokens[-1] in self.eos:
                self.reasons[i] = "stop"
            elif len(self.outputs[i]) == self.limits[i]:
                self.reasons[i] = "length"
            news.append(Emitted(i, tokens, self.reasons[i]))
        return news

    def held(self, slots: list[list[int]]) -> list[list[int]]:
        """Tokens whose keys are in each slot's cache: all but the last, which was never fed."""
        known = [p + out[:-1] for p, out in zip(self.prompts, self.outputs, strict=True)]
        return known + slots[len(known) :]


def _chunks(prompts, starts, settings: GenerateConfig) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut what is left of the prompts, in slot order, into (tokens_T, q_len_S) of listed widths."""
    widths = settings.prefill_widths
    left = [list(p[start:]) for p, start in zip(prompts, starts, strict=True)]
    while total := sum(map(len, left)):
        width = next((w for w in widths if w >= total), widths[-1])
        tokens_T = np.zeros(width, np.int32)
        q_len_S = np.zeros(settings.max_num_seqs, np.int32)
        used = 0
        for slot, tokens in enumerate(left):
            n = min(len(tokens), width - used)
            tokens_T[used : used + n] = tokens[:n]
            q_len_S[slot] = n
            left[slot] = tokens[n:]
            used += n
        yield tokens_T, q_len_S


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
