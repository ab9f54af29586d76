"""How an engine is set up: the arguments users give, and the sizes and engine that follow."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.checks import (
    check_flag,
    check_integer,
    check_number,
    check_one_of,
    check_size,
    plain_integers,
)
from engine.config import POLICIES, SIZES, EngineConfig
from engine.engine import Engine
from engine.kernel_choice import kernel_chip
from engine.memory import check_cache_fits, spare_memory_bytes
from engine.network import NetworkModel
from engine.platform import attached_chip, min_matmul_rows, unknown_accelerator
from engine.recording import check_record_path
from engine.sampling_rows import CAPACITIES, SamplingLimits
from models.config import ModelConfig
from models.kv_cache import CacheSpecs, init_cache, num_pages_for, page_bytes
from models.model import ModelParams, cache_specs
from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention import IMPLEMENTATIONS
from pallas_kernels.paged_attention.layout import default_page_size

SIZE_OF = {  # argument: the size of `EngineConfig` that it sets
    "max_num_seqs": "max_num_seqs",
    "max_model_len": "max_model_len",
    "page_size": "page_size",
    "max_num_batched_tokens": "token_budget",
    "steps_per_dispatch": "max_rounds",
    "max_stop_ids": "max_stop_ids",
}
OPTIONAL = ("max_model_len", "page_size")


@dataclass(frozen=True)
class EngineArgs:
    """How the engine runs, apart from the model.

    max_num_seqs            requests that run at once
    max_model_len           prompt and output tokens of one request; None: the model's, 4096 at most
    num_pages               pages of the cache; None: what `max_num_seqs` full requests need, or
                            `gpu_memory_utilization` of the device's free memory if that is less
    page_size               positions of a page; None: 64 on a TPU, else 16
    max_num_batched_tokens  prompt tokens computed per round
    max_logprobs, max_logit_bias, max_allowed_ids, max_bad_words, max_bad_word_len, max_stop_ids
                            what one request may ask for: best log-probabilities per token, entries
                            of its lists, tokens of a bad word; each slot has room for as many
    scheduling_policy       continuous, or static (admit only when nothing runs)
    steps_per_dispatch      rounds the device runs before the host looks: fewer for smoother streams
    overlap                 dispatch before the previous dispatch's tokens are read
    attention_impl          auto, or an implementation of ragged paged attention
    record                  file to write the record of every dispatch to
    seed                    what requests without a seed draw theirs from; None: fresh ones
    """

    max_num_seqs: int = 8
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    num_pages: int | None = None
    page_size: int | None = None
    max_num_batched_tokens: int = 256
    enable_prefix_caching: bool = True
    max_logprobs: int = 20
    max_logit_bias: int = 64
    max_allowed_ids: int = 256
    max_bad_words: int = 32
    max_bad_word_len: int = 8
    max_stop_ids: int = 8
    scheduling_policy: str = "continuous"
    steps_per_dispatch: int = 16
    overlap: bool = True
    attention_impl: str = "auto"
    record: str | Path | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, size in SIZE_OF.items():
            if getattr(self, name) is not None or name not in OPTIONAL:
                check_size(name, getattr(self, name), *SIZES[size])
        for name, bounds in CAPACITIES.items():
            check_size(name, getattr(self, name), *bounds)
        if self.num_pages is not None:  # their upper bound is the device's memory
            check_integer("num_pages", self.num_pages, 2, None, "page 0 is trash")
        if self.seed is not None:
            check_integer("seed", self.seed, 0, 2**64 - 1, "any of these will do")
        plain_integers(self)
        check_flag("enable_prefix_caching", self.enable_prefix_caching)
        check_flag("overlap", self.overlap)
        fraction, fix = self.gpu_memory_utilization, "it is a fraction of the free memory"
        check_number("gpu_memory_utilization", fraction, 0.0, 1.0, fix, exclusive_low=True)
        check_one_of("scheduling_policy", self.scheduling_policy, POLICIES)
        check_one_of("attention_impl", self.attention_impl, ("auto", *IMPLEMENTATIONS))
        if self.record is not None:
            check_record_path(self.record)

    def engine_config(self, network: ModelConfig, dtype: Any) -> EngineConfig:
        """The engine's sizes for a network whose cache is of `dtype`, on the attached device.

        What is refused here can be asked before the network's weights are there, and is by `LLM`.
        """
        max_model_len = self.max_model_len
        if max_model_len is None:
            max_model_len = min(network.max_position, 4096)
        if max_model_len > network.max_position:
            raise ValueError(
                f"max_model_len must be at most {network.max_position} (the model's limit), got "
                f"{max_model_len}; choose less"
            )
        chip = attached_chip()
        page_size = self.page_size or default_page_size(chip)
        config = engine_config(
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            num_pages=2,
            page_size=page_size,
            token_budget=self.max_num_batched_tokens,
            max_rounds=self.steps_per_dispatch,
            max_stop_ids=self.max_stop_ids,
            enable_prefix_caching=self.enable_prefix_caching,
            policy=self.scheduling_policy,
        )
        spare_bytes = spare_memory_bytes(config, self.sampling_limits(network))
        pages = _num_pages(self, config, cache_specs(network), dtype, chip, spare_bytes)
        config = replace(config, num_pages=pages)
        unknown = unknown_accelerator()
        kernel_chip(network, config, dtype, chip, self.attention_impl, unknown=unknown)
        return config

    def sampling_limits(self, network: ModelConfig) -> SamplingLimits:
        return SamplingLimits(
            vocab_size=network.vocab_size,
            max_logprobs=self.max_logprobs,
            max_logit_bias=self.max_logit_bias,
            max_allowed_ids=self.max_allowed_ids,
            max_bad_words=self.max_bad_words,
            max_bad_word_len=self.max_bad_word_len,
        )


def engine_config(
    *, max_num_seqs: int, max_model_len: int, token_budget: int, **sizes: Any
) -> EngineConfig:
    """`EngineConfig` with the slots and inbox that go with these sizes."""
    inbox_size = min(2 * max_num_seqs, 64)
    return EngineConfig(
        max_num_seqs=max_num_seqs,
        num_slots=2 * max_num_seqs,
        max_model_len=max_model_len,
        token_budget=token_budget,
        inbox_size=inbox_size,
        inbox_tokens=max(max_model_len, inbox_size * token_budget),
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

    A warning tells if the attached chip has attention kernels that cannot take its calls, or may
    have some but is unknown.
    """
    dtype = params.embed_VD.dtype
    attached = attached_chip()
    chip, reason = kernel_chip(
        config, engine_config, dtype, attached, attention_impl, unknown=unknown_accelerator()
    )
    if reason is not None:
        warnings.warn(f"attention runs as plain XLA operations: {reason}", stacklevel=2)
    network = NetworkModel(config, limits, dtype, attention_impl, min_matmul_rows(dtype), chip)
    specs, pages, page_size = cache_specs(config), engine_config.num_pages, engine_config.page_size
    check_cache_fits(engine_config, limits, pages * page_bytes(specs, page_size, dtype, chip))
    cache = init_cache(specs, pages, page_size, dtype, chip)
    compiler_options = dict(attached.compiler_options) if attached else {}
    return Engine(
        engine_config, network, params, cache, limits, compiler_options=compiler_options, **options
    )


def _num_pages(
    args: EngineArgs,
    config: EngineConfig,
    specs: CacheSpecs,
    dtype: Any,
    chip: Chip | None,
    spare_bytes: int | None,
) -> int:
    full, fraction = args.max_num_seqs * config.pages_per_seq + 1, args.gpu_memory_utilization
    if spare_bytes is None:
        if args.num_pages is None:
            raise ValueError(f"cannot tell how much memory is free here; set num_pages, {full} say")
        return args.num_pages
    most = num_pages_for(specs, config.page_size, dtype, spare_bytes, fraction, chip)
    if args.num_pages is None:
        return min(full, most)
    if args.num_pages > most:
        each_bytes = page_bytes(specs, config.page_size, dtype, chip)
        raise ValueError(
            f"num_pages {args.num_pages} of {each_bytes:,} bytes do not fit: {fraction:.0%} of the "
            f"device's free memory holds {most}; use fewer pages or a smaller dtype"
        )
    return args.num_pages
