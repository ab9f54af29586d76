"""How an engine is set up: the arguments users give, and the sizes and engine that follow."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.engine import Engine
from engine.kernel_choice import kernel_chip
from engine.network import NetworkModel
from engine.platform import attached_chip, free_memory_bytes, min_matmul_rows
from engine.sampling_rows import SamplingLimits
from engine.state import EngineConfig
from models.config import ModelConfig
from models.kv_cache import init_cache, num_pages_for, page_bytes
from models.model import ModelParams, cache_specs
from pallas_kernels.paged_attention import IMPLEMENTATIONS
from pallas_kernels.paged_attention.layout import default_page_size


@dataclass(frozen=True)
class EngineArgs:
    """How the engine runs, apart from the model.

    max_num_seqs            requests that run at once
    max_model_len           prompt and output tokens of one request; None: the model's, 4096 at most
    num_pages               pages of the cache; None: what `max_num_seqs` full requests need, or
                            `gpu_memory_utilization` of the device's free memory if that is less
    page_size               positions of a page; None: 64 on a TPU, else 16
    max_num_batched_tokens  prompt tokens computed per round
    max_logprobs            best log-probabilities a request may ask for per token
    scheduling_policy       continuous, or static (admit only when nothing runs)
    steps_per_dispatch      rounds the device runs before the host looks
    overlap                 dispatch before the previous dispatch's tokens are read
    attention_impl          auto, or an implementation of ragged paged attention
    record                  file to write the record of every dispatch to
    """

    max_num_seqs: int = 8
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    num_pages: int | None = None
    page_size: int | None = None
    max_num_batched_tokens: int = 256
    enable_prefix_caching: bool = True
    max_logprobs: int = 20
    scheduling_policy: str = "continuous"
    steps_per_dispatch: int = 8
    overlap: bool = True
    attention_impl: str = "auto"
    record: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "steps_per_dispatch"):
            _whole(name, getattr(self, name))
        _whole("max_logprobs", self.max_logprobs, least=0)
        for name in ("max_model_len", "num_pages", "page_size"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name))
        for name in ("enable_prefix_caching", "overlap"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.gpu_memory_utilization, int | float):
            raise TypeError(
                f"gpu_memory_utilization must be a number, got {self.gpu_memory_utilization!r}"
            )
        if self.record is not None and not isinstance(self.record, str | Path):
            raise TypeError(f"record must be a path, got {self.record!r}")
        if self.attention_impl not in ("auto", *IMPLEMENTATIONS):
            raise ValueError(
                f"unknown attention_impl {self.attention_impl!r}; use auto, "
                f"{' or '.join(IMPLEMENTATIONS)}"
            )

    def engine_config(self, network: ModelConfig, dtype: Any) -> EngineConfig:
        """The engine's sizes for a network whose cache is of `dtype`, on the attached device."""
        max_model_len = self.max_model_len
        if max_model_len is None:
            max_model_len = min(network.max_position, 4096)
        if not 1 <= max_model_len <= network.max_position:
            raise ValueError(
                f"max_model_len must be in 1 .. {network.max_position} (the model's limit), got "
                f"{max_model_len}"
            )
        chip = attached_chip()
        page_size = self.page_size or default_page_size(chip)
        return engine_config(
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            num_pages=_num_pages(self, cache_specs(network), page_size, dtype, chip, max_model_len),
            page_size=page_size,
            token_budget=self.max_num_batched_tokens,
            max_rounds=self.steps_per_dispatch,
            enable_prefix_caching=self.enable_prefix_caching,
            policy=self.scheduling_policy,
        )


def _whole(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def engine_config(
    *, max_num_seqs: int, max_model_len: int, token_budget: int, **sizes: Any
) -> EngineConfig:
    """`EngineConfig` with the slots and inbox that go with these sizes."""
    return EngineConfig(
        max_num_seqs=max_num_seqs,
        num_slots=2 * max_num_seqs,
        max_model_len=max_model_len,
        token_budget=token_budget,
        inbox_size=min(2 * max_num_seqs, 64),
        inbox_tokens=max(max_model_len, 4 * token_budget),
        **sizes,
    )


def network_engine(
    config: ModelConfig,
    params: ModelParams,
    engine_config: EngineConfig,
    limits: SamplingLimits,
    attention_impl: str = "auto",
    **options: Any,
) -> Engine:
    """An engine that runs a network; `options` are those of `Engine`.

    A warning tells if the attached chip has attention kernels that cannot take its calls.
    """
    dtype = params.embed_VD.dtype
    chip, reason = kernel_chip(config, engine_config, dtype, attached_chip(), attention_impl)
    if reason is not None:
        warnings.warn(f"attention runs as plain XLA operations: {reason}", stacklevel=2)
    network = NetworkModel(config, limits, dtype, attention_impl, min_matmul_rows(dtype), chip)
    specs, pages = cache_specs(config), engine_config.num_pages
    cache = init_cache(specs, pages, engine_config.page_size, dtype, chip)
    return Engine(engine_config, network, params, cache, limits, **options)


def _num_pages(args: EngineArgs, specs, page_size: int, dtype, chip, max_model_len: int) -> int:
    fraction = args.gpu_memory_utilization
    most = num_pages_for(specs, page_size, dtype, free_memory_bytes(), fraction, chip)
    if args.num_pages is None:
        return min(args.max_num_seqs * -(-max_model_len // page_size) + 1, most)
    if args.num_pages > most:
        each_bytes = page_bytes(specs, page_size, dtype, chip)
        raise ValueError(
            f"num_pages {args.num_pages} of {each_bytes:,} bytes do not fit: {fraction:.0%} of the "
            f"device's free memory holds {most}; use fewer pages or a smaller dtype"
        )
    return args.num_pages
