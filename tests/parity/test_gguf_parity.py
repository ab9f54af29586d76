"""GGUF loading beside transformers' own, for made-up files: same tensors, bit for bit."""

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from models.checkpoint.assemble import load_params
from models.checkpoint.load import load_model
from models.families import family_of_hf
from models.model import declare
from tests.models.checkpoint.files import (
    BFLOAT16,
    as_gguf,
    gguf_and_hf_fields,
    hf_tensors,
    write_gguf,
)


class StateDict:
    """Tensors that transformers read, as a store."""

    path = Path("transformers")

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors = {name: value.numpy() for name, value in tensors.items()}

    def names(self):
        return self.tensors.keys()

    def shape(self, name):
        return self.tensors[name].shape

    def read(self, name):
        return self.tensors[name]

    def where(self, name):
        return f"transformers: tensor {name!r}"


def _by_transformers(path: Path, config: PretrainedConfig) -> StateDict:
    """The tensors of transformers' GGUF loader, without the model around them."""
    config.pad_token_id = None  # some classes default to one beyond a small vocabulary
    with torch.device("meta"):
        names_of = AutoModelForCausalLM.from_config(config)
    return StateDict(
        load_gguf_checkpoint(path, return_tensors=True, model_to_load=names_of)["tensors"]
    )


def assert_same_parameters(params, state: StateDict, fields: dict) -> None:
    family = family_of_hf(fields)
    config = family.config_from_hf(fields)
    expected = load_params(
        state,
        declare(config),
        family.hf_sources(config),
        "float32",
        ignored=family.hf_ignored,
        progress=False,
    )
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "phi3", "gpt2", "gemma2", "gemma3"])
def test_b78_b83_made_up_model_equals_transformers(tmp_path, arch):
    """The file is written by the rules of the tests next door; transformers reads it by its own."""
    gguf_fields, hf_fields = gguf_and_hf_fields(arch)
    config, tensors = hf_tensors(hf_fields)
    tensors = {k: v.astype(BFLOAT16).astype(np.float32) for k, v in tensors.items()}
    tokens = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(97)]}
    path = tmp_path / "m.gguf"
    write_gguf(path, arch, gguf_fields | tokens, as_gguf(arch, config, tensors))
    _, params = load_model(path, "float32")
    state = _by_transformers(path, AutoConfig.from_pretrained(tmp_path, gguf_file=path.name))
    assert set(state.names()) == set(tensors)
    for name, value in tensors.items():
        np.testing.assert_array_equal(state.read(name), value, err_msg=name)
    assert_same_parameters(params, state, hf_fields)
