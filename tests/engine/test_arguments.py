"""Arguments of `LLM` and fields of its settings: what is no value of theirs is refused by name, and
before a weight is read.
"""

import math
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from engine import llm as llm_module
from engine.beam_search import BeamSearchParams
from engine.engine_args import EngineArgs
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.engine.test_llm import CONFIG, DEFAULTS, PARAMS
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
