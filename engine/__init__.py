"""How models are served. The front door is `LLM` with `SamplingParams`."""

from engine.beam_search import BeamSearchParams
from engine.llm import LLM
from engine.sampling_params import SamplingParams

__all__ = ["LLM", "BeamSearchParams", "SamplingParams"]
