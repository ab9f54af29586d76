"""Fixtures over the small vocabularies."""

import json

import pytest
import tokenizers
from tokenizers import processors

from tests.engine.tokenizer import small


@pytest.fixture(scope="session")
def byte_level_json() -> dict:
    return small.byte_level_json()


@pytest.fixture(scope="session")
def byte_level_fields(byte_level_json) -> dict:
    return small.byte_level_fields(byte_level_json)


@pytest.fixture(scope="session")
def piece_fields() -> dict:
    return small.piece_fields()


@pytest.fixture(scope="session")
def add_bos():
    """tokenizer.json content with a post-processor that puts one token in front."""

    def build(content: dict, token: str) -> dict:
        backend = tokenizers.Tokenizer.from_str(json.dumps(content))
        backend.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", special_tokens=[(token, backend.token_to_id(token))]
        )
        return json.loads(backend.to_str())

    return build


@pytest.fixture
def directory(tmp_path):
    """(tokenizer.json content, **other files by name) -> directory; a str is written as it is."""

    def write(content, **files):
        for name, value in {"tokenizer.json": content, **files}.items():
            text = value if isinstance(value, str) else json.dumps(value)
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return write
