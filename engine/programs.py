"""The engine's programs: `advance` compiled once per token budget, when it is first needed.

In: the static settings, and arrays of the shapes that every call will have. Out: compiled programs.
Programs differ in their token budget alone: a shorter one when few prompt tokens wait, the full one
else. Each can go on from any state, so no request mix ever needs another.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from engine.commit import Emission
from engine.config import EngineConfig
from engine.dispatch import Dispatch, make_inbox
from engine.sampling_rows import SamplingLimits
from engine.step import StepModel, advance


class Programs:
    """`compiled` are those there are, by token budget; `compile_s` is what they took."""

    def __init__(
        self,
        config: EngineConfig,
        limits: SamplingLimits,
        model: StepModel,
        compiler_options: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._config, self._limits, self._model = config, limits, model
        self._compiler_options, self._clock = dict(compiler_options or {}), clock
        self.compiled: dict[int, jax.stages.Compiled] = {}
        self.compile_s = 0.0

    def budget_for(self, prompt_tokens: int) -> int:
        """The least that takes so many in one round; any decodes, and none is compiled for that."""
        budgets = self._config.program_budgets
        fits = next((b for b in budgets if b >= prompt_tokens), budgets[-1])
        return fits if prompt_tokens else min(self.compiled, default=fits)

    def get(self, budget: int, *arrays: Any) -> jax.stages.Compiled:
        """The program of a budget; `arrays` are parameters, cache and state."""
        if budget not in self.compiled:
            start_s = self._clock()
            step = jax.jit(
                self._step(budget),
                donate_argnums=(1, 2),
                compiler_options=self._compiler_options,
            )
            self.compiled[budget] = step.lower(*arrays, *self._nothing(budget)).compile()
            self.compile_s += self._clock() - start_s
        return self.compiled[budget]

    def emission_like(self, budget: int, *arrays: Any) -> Emission:
        """Shapes of what a call brings."""
        return jax.eval_shape(self._step(budget), *arrays, *self._nothing(budget))[2]

    def _step(self, budget: int) -> Callable:
        return partial(advance, replace(self._config, token_budget=budget), self._model)

    def _nothing(self, budget: int) -> tuple:
        """The inbox and the rounds of a call that brings nothing."""
        nothing = Dispatch([], [], rounds=1, budget=budget)
        return make_inbox(self._config, self._limits, nothing), jnp.int32(1)
