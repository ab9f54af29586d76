"""The model families: which there are, and how a checkpoint's own words lead to one.

A directory's config.json names a `model_type`, a GGUF file an architecture; both lead to one
`Family`, an unknown one is refused by name.
"""

import json
from pathlib import Path
from typing import Any

from models.families.family import Family
from models.families.fields import Fields, token_ids
from models.families.gemma import GEMMA2, GEMMA3
from models.families.gpt2 import GPT2
from models.families.llama import LLAMA, MISTRAL, SMOLLM3
from models.families.olmo2 import OLMO2
from models.families.phi3 import PHI3
from models.families.qwen import QWEN2, QWEN3

FAMILIES = (LLAMA, MISTRAL, SMOLLM3, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, OLMO2, GPT2)


def family_of_hf(fields: Fields) -> Family:
    """The family of a config.json's fields."""
    model_type = fields.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(f"config.json: model_type {model_type!r} is not supported; known: {known}")


def family_of_gguf(arch: str) -> Family:
    """The family of a GGUF file's `general.architecture`."""
    for family in FAMILIES:
        if arch in family.gguf_archs:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.gguf_archs)
    raise ValueError(f"GGUF architecture {arch!r} is not supported; known: {known}")


def read_fields(directory: Path) -> dict[str, Any]:
    """The fields of a checkpoint directory's config.json.

    Generation may also end at the ids that generation_config.json lists, if there is one:
    `eos_token_id` holds the union.
    """
    fields = _read_object(directory / "config.json")
    generation_path = directory / "generation_config.json"
    if generation_path.exists():
        ids = token_ids(_read_object(generation_path), "eos_token_id", None)
        if ids:
            config_from_hf = family_of_hf(fields).config_from_hf
            fields["eos_token_id"] = sorted({*config_from_hf(fields).eos_token_ids, *ids})
    return fields


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
