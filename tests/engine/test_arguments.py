"""What callers give: arguments of `LLM`, fields of its settings, lists of prompts.

What is no value of theirs is refused by name, and before a weight is read.
"""

import math
import shutil
from dataclasses import fields
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from engine import llm as llm_module
from engine.beam_search import BeamSearchParams
from engine.engine_args import EngineArgs
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from models.kv_cache import kv_bytes_per_token
from models.model import cache_specs
from tests.engine.test_checkpoint import Letters
from tests.engine.test_llm import CONFIG, DEFAULTS, PARAMS, fresh_llm, greedy, shared_llm
from tests.tiny import write_tokenizer

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens" / "smollm2"
NEEDED = {BeamSearchParams: {"beam_width": 1, "max_tokens": 1}}
# No field takes any of these; arrays have no truth value, huge integers no float.
NEVER = [
    *(math.nan, -math.inf, -(10**30), -(10**400), 1j, object(), len, ...),
    *(b"x", [None], [b"a"], {"a"}, {None: 1}, iter([1])),
    *(np.array([1, 2]), np.array([]), np.float64("nan"), np.array("auto")),
]


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    """A model of which all but the weights can be read."""
    shutil.copy(GOLDENS / "config.json", tmp_path)
    shutil.copy(GOLDENS / "model.safetensors", tmp_path)
    write_tokenizer(tmp_path)

    def read_weights(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr(llm_module, "load_model", read_weights)
    monkeypatch.setattr(llm_module, "enable_compilation_cache", lambda: None)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (settings, field.name)
        for settings in (EngineArgs, SamplingParams, BeamSearchParams)
        for field in fields(settings)
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_b97_no_field_takes_what_is_no_value_of_any(settings, name):
    default = next(f.default for f in fields(settings) if f.name == name)
    for value in NEVER + ([True, "1"] if type(default) in (int, float) else []):
        with pytest.raises((TypeError, ValueError), match=name):
            settings(**NEEDED.get(settings, {}) | {name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 5}, "model must be a name or a path, got 5"),
        ({"model": Path("nowhere")}, "no file or directory nowhere"),
        ({"tokenizer": 5}, "tokenizer must be a name or a path, got 5"),
        ({"tokenizer": ""}, "unknown model ''"),
        ({"tokenizer": "no/such.gguf"}, "no file or directory no/such.gguf"),
        ({"dtype": "float16"}, "unknown dtype 'float16'; use auto or float32 or bfloat16"),
        ({"dtype": ["auto"]}, "unknown dtype"),
        ({"compilation_cache": 1}, "compilation_cache must be True or False, got 1"),
        ({"max_model_len": 1}, "max_model_len must be at least 2, got 1; choose more"),
        ({"max_model_len": 2**17 + 1}, r"must be at most 131072 \(the model's limit\), got 131073"),
        ({"max_logprobs": -1}, "max_logprobs must be at least 0, got -1"),
        ({"num_pages": 10**9}, "do not fit"),
        ({"attention_impl": "gpu_mosaic"}, "gpu_mosaic"),
        ({"record": "nowhere/run.jsonl"}, "record nowhere/run.jsonl cannot be written: No such"),
        ({"record": "."}, r"record \. cannot be written: Is a directory; name another file"),
        ({"record": "a\0b"}, "record a\0b cannot be written"),
        ({"temperature": 1}, "temperature"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_arguments_are_refused_before_weights_are_read(directory, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LLM(**{"model": directory} | arguments)


def test_good_arguments_get_as_far_as_the_weights(directory):
    record = directory / "run.jsonl"
    with pytest.raises(AssertionError, match="weights were read"):
        LLM(directory, directory, dtype="float32", max_model_len=2, record=record)
    assert not record.exists()


def test_parameters_in_memory_are_what_they_are_said_to_be():
    for arguments, message in (
        ((5, PARAMS), "config must be a ModelConfig, got 5"),
        ((CONFIG, 5), "params must be ModelParams, got 5"),
    ):
        with pytest.raises(TypeError, match=message):
            LLM.from_params(*arguments, **DEFAULTS)
    with pytest.raises(TypeError, match="name must be a string, got 5"):
        LLM.from_params(CONFIG, PARAMS, name=5, **DEFAULTS)


def test_a_bad_word_list_of_another_kind_is_named():
    engine = LLM.from_params(CONFIG, PARAMS, **DEFAULTS).engine
    for words in (5, "ab", b"ab", {(1,)}):
        with pytest.raises(TypeError, match="bad_word_ids must be a list of lists of token ids"):
            engine.add_request("x", [1], SamplingParams(), bad_word_ids=words)
    assert not engine.has_unfinished


def test_unsupported_and_unknown_settings_are_refused():
    llm = shared_llm()
    with pytest.raises(ValueError, match="2 prompts but 1 sampling_params"):
        llm.generate([[1], [2]], [greedy(2)], use_tqdm=False)
    for wrong in (5, iter([greedy(2)]), BeamSearchParams(1, 1)):
        with pytest.raises(TypeError, match="sampling_params must be SamplingParams or a list"):
            llm.generate([[1]], wrong, use_tqdm=False)
    with pytest.raises(TypeError, match="tensor_parallel"):
        fresh_llm(tensor_parallel=2)
    with pytest.raises(TypeError):
        SamplingParams(temprature=1)
    for params in ([greedy(2), None], [greedy(2), {"temperature": 0}]):
        with pytest.raises(TypeError, match="must be SamplingParams"):
            llm.generate([[1], [2]], params, use_tqdm=False)
    for priority in (2**40, 1.5, None):
        with pytest.raises(ValueError, match="priority must be an integer"):
            llm.generate([[1]], greedy(2), priority=[priority], use_tqdm=False)
    assert not llm.engine.has_unfinished
    llm.engine.add_request("x", [1], greedy(1))
    with pytest.raises(ValueError, match="'x' is in use"):
        llm.engine.add_request("x", [1], greedy(1))
    llm.engine.abort("x")
    with pytest.raises(ValueError, match="no unfinished request has the id 'x'"):
        llm.engine.abort("x")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_logprobs": -1}, "max_logprobs must be at least 0, got -1"),
        ({"max_model_len": 513}, r"must be at most 512 \(the model's limit\), got 513"),
        ({"num_pages": 1}, "num_pages must be at least 2"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"scheduling_policy": "fifo"}, "unknown scheduling_policy 'fifo'"),
        ({"attention_impl": "cuda"}, "cuda"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        fresh_llm(**settings).engine.compile()


def test_settings_of_the_wrong_type_are_refused():
    for settings in ({"max_num_seqs": 1.5}, {"page_size": "4"}, {"num_pages": True}):
        with pytest.raises(TypeError, match="must be an integer"):
            fresh_llm(**settings)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("enable_prefix_caching", "no"),
        ("overlap", 1),
        ("gpu_memory_utilization", "0.9"),
        ("record", 5),
    ],
)
def test_engine_settings_of_the_wrong_type_are_refused(setting, value):
    with pytest.raises(TypeError, match=f"{setting} must be .*{value!r}"):
        fresh_llm(**{setting: value})


def test_more_pages_than_memory_are_refused():
    page_bytes = 4 * kv_bytes_per_token(cache_specs(CONFIG), jnp.float32)
    with pytest.raises(ValueError, match=rf"num_pages {10**9} of {page_bytes:,} bytes do not fit"):
        fresh_llm(num_pages=10**9)


def test_an_end_of_sequence_id_outside_the_vocabulary_is_refused():
    config = CONFIG.__class__(**{**vars(CONFIG), "eos_token_ids": (10**12,)})
    with pytest.raises(ValueError, match="end-of-sequence ids holds token id 1000000000000"):
        fresh_llm(config).generate([[1]], greedy(1), use_tqdm=False)


def test_token_ids_of_a_mapping_are_never_text():
    with pytest.raises(ValueError, match="token ids must be a list of integers"):
        shared_llm().generate({"prompt_token_ids": "ab"}, greedy(2), use_tqdm=False)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[1]], {"priority": 5}, "priority must be a list of integers, one per prompt, got 5"),
        ([[1]], {"sampling_params": 5}, "sampling_params must be SamplingParams or a list"),
    ],
)
def test_lists_that_are_none_are_refused(prompts, settings, message):
    with pytest.raises(TypeError, match=message):
        shared_llm().generate(prompts, **settings, use_tqdm=False)


def test_an_array_without_a_dimension_is_no_prompt():
    with pytest.raises(ValueError, match=r"prompts\[0\]: token ids must be a list of integers"):
        shared_llm().generate(np.array(3), greedy(1), use_tqdm=False)
    with pytest.raises(TypeError, match="model must be a name or a path, got None"):
        LLM(None)


@pytest.mark.parametrize(
    "messages", [None, 5, "hello", {"role": "user", "content": "hello"}, [5], ["hello"]]
)
def test_conversations_of_another_kind_are_refused(messages):
    llm = LLM.from_params(CONFIG, PARAMS, Letters(), **DEFAULTS)
    with pytest.raises(TypeError, match="messages must be a list of mappings, or of such lists"):
        llm.chat(messages)
