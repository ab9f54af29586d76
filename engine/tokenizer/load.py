"""A tokenizer from files: an HF directory, or a GGUF file.

In: the path of a directory with `tokenizer.json`, or of a `.gguf` file. Out: `Tokenizer`. Of a
directory these are read where present: tokenizer_config.json and special_tokens_map.json (names of
special tokens, chat template), generation_config.json and config.json (end-of-text ids, size),
chat_template.jinja and additional_chat_templates/*.jinja. tokenizer.json alone decides the ids,
also whether BOS is added. Whatever is missing or damaged is one ValueError that names the file.
"""

import json
import os
from pathlib import Path

import tokenizers

from engine.tokenizer.gguf import tokenizer_from_gguf
from engine.tokenizer.tokenizer import Tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer of the model at `path`: a local HF directory or a `.gguf` file."""
    path = Path(path)
    if path.is_dir():
        return _from_directory(path)
    if path.is_file() and path.suffix == ".gguf":
        # Imported here: nothing else needs a reader of GGUF.
        from models.checkpoint.gguf import open_gguf

        return tokenizer_from_gguf(open_gguf(path).fields)
    state = "is neither a directory nor a .gguf file" if path.exists() else "does not exist"
    raise ValueError(f"{path} {state}: name a directory with tokenizer.json, or a .gguf file")


def _from_directory(directory: Path) -> Tokenizer:
    backend = _read_backend(directory / "tokenizer.json")
    config = _read_json(directory / "tokenizer_config.json")
    names = _read_json(directory / "special_tokens_map.json") | config
    special_tokens = {}
    for name in _NAMED_TOKENS:
        text = _token_text(names.get(name), directory, name)
        if text is not None:
            _make_special(backend, text, directory, name)
            special_tokens[name] = text
    # Every id that ends a text: the union of what tokenizer, generation and model config name.
    eos_token_ids = set()
    if "eos_token" in special_tokens:
        eos_token_ids.add(backend.token_to_id(special_tokens["eos_token"]))
    vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
    for path in (directory / "generation_config.json", directory / "config.json"):
        for declared in _declarations(path):
            eos_token_ids.update(_listed_ids(declared.get("eos_token_id"), path))
            vocab_size = max(vocab_size, _size(declared.get("vocab_size"), path))
    return Tokenizer(
        backend,
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        eos_token_ids=eos_token_ids,
        chat_templates=_chat_templates(directory, config),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ValueError(
            f"{path.parent} has no tokenizer.json: save it there with transformers "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(directory))"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every kind of damage
        raise ValueError(f"{path} is not a usable tokenizer.json: {error}") from error
    if not backend.get_vocab_size():
        raise ValueError(f"{path} is not a usable tokenizer.json: it holds no tokens")
    return backend


def _read_json(path: Path) -> dict:
    """The JSON object in `path`, empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _token_text(value: object, directory: Path, name: str) -> str | None:
    """A token is stored as its text, or as an object with its text in "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise ValueError(
            f"{directory / 'tokenizer_config.json'}: {name} must be a string or an object with "
            f"content, got {value!r}"
        )
    return value


def _make_special(backend: tokenizers.Tokenizer, text: str, directory: Path, name: str) -> None:
    """A token that the config names is special, whatever tokenizer.json says; the rest stays."""
    token_id = backend.token_to_id(text)
    if token_id is None:
        raise ValueError(
            f"{directory}: tokenizer_config.json names {name} {text!r}, which tokenizer.json does "
            "not contain: add it to added_tokens there, or remove the name"
        )
    token = backend.get_added_tokens_decoder().get(token_id)
    token = token or tokenizers.AddedToken(text, normalized=False)
    if not token.special:
        token.special = True
        backend.add_special_tokens([token])


def _declarations(path: Path) -> list[dict]:
    """The object in a config file, and its part about text in models of several modalities."""
    config = _read_json(path)
    nested = config.get("text_config")
    return [config, nested] if isinstance(nested, dict) else [config]


def _size(declared: object, path: Path) -> int:
    """The model's vocabulary, which may be padded beyond the tokenizer's; 0 where it is absent."""
    if declared is None:
        return 0
    if type(declared) is not int or declared < 1:
        raise ValueError(f"{path}: vocab_size must be a positive integer, got {declared!r}")
    return declared


def _listed_ids(declared: object, path: Path) -> list[int]:
    """`eos_token_id` is one id, a list of ids, or null."""
    if declared is None:
        return []
    ids = declared if isinstance(declared, list) else [declared]
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise ValueError(f"{path}: eos_token_id must be an id or a list of ids, got {declared!r}")
    return ids


def _chat_templates(directory: Path, config: dict) -> dict[str, str]:
    """Template text by name. Files of their own come before an entry in tokenizer_config.json."""
    paths = {path.stem: path for path in directory.glob("additional_chat_templates/*.jinja")}
    if (directory / "chat_template.jinja").is_file():
        paths["default"] = directory / "chat_template.jinja"
    if paths:
        try:
            return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
        except UnicodeDecodeError as error:
            raise ValueError(f"{directory}: a chat template file is not UTF-8: {error}") from error
    entry = config.get("chat_template")
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    try:
        return {str(item["name"]): str(item["template"]) for item in entry}
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{directory / 'tokenizer_config.json'}: chat_template must be a string or a list of "
            "objects with name and template"
        ) from error
