"""Tokenizers from files: HF directories and GGUF files, whole and damaged."""

import json

import numpy as np
import pytest
from gguf import GGUFWriter

from engine.tokenizer import load_tokenizer, tokenizer_from_gguf

TEXTS = ["", " a", "  ", "12345", "naïve — 😀", "a\r\nb\t\n", "你好", "x <|im_end|> y"]


def test_directory_gives_the_ids_of_the_equivalent_gguf(
    directory, byte_level_json, byte_level_fields, add_bos
):
    names = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": None}
    path = directory(add_bos(byte_level_json, "<|im_start|>"), **{"tokenizer_config.json": names})
    tokenizer = load_tokenizer(path)
    other = tokenizer_from_gguf(byte_level_fields | {"tokenizer.ggml.add_bos_token": True})
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == other.encode(text)
        assert ids[0] == 1
        assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
        assert tokenizer.decode(ids) == other.decode(ids) == text.replace("<|im_end|>", "")
    assert tokenizer.vocab_size == other.vocab_size == 450
    assert tokenizer.special_ids == other.special_ids == {0, 1, 2}
    assert tokenizer.bos_token_id == 1
    assert tokenizer.pad_token_id is None
    assert tokenizer.eos_token_ids == {2}


def test_b30_end_ids_are_the_union_of_all_files(directory, byte_level_json):
    path = directory(
        byte_level_json,
        **{
            "tokenizer_config.json": {"eos_token": "<|im_end|>"},
            "generation_config.json": {"eos_token_id": [7, 9]},
            "config.json": {"eos_token_id": 0, "text_config": {"eos_token_id": [11]}},
        },
    )
    assert load_tokenizer(path).eos_token_ids == {0, 2, 7, 9, 11}


def test_b30_no_file_names_an_end(directory, byte_level_json):
    path = directory(byte_level_json, **{"config.json": {"eos_token_id": None}})
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.bos_token_id is None


def test_special_tokens_map_is_read_where_the_config_is_silent(directory, byte_level_json):
    names = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    path = directory(
        byte_level_json,
        **{"special_tokens_map.json": names, "tokenizer_config.json": {"bos_token": None}},
    )
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, {2})


def test_a_named_special_token_is_special(directory, byte_level_json):
    """Also where tokenizer.json does not say so: else it would appear in the text."""
    path = directory(byte_level_json, **{"tokenizer_config.json": {"eos_token": "Ġthe"}})
    tokenizer = load_tokenizer(path)
    (token,) = tokenizer.eos_token_ids
    assert token in tokenizer.special_ids
    assert tokenizer.decode([token]) == ""
    assert tokenizer.vocab_size == 450


def test_a_named_token_keeps_its_other_properties(directory, byte_level_json):
    flags = {"single_word": False, "lstrip": False, "rstrip": True, "normalized": False}
    added = [
        token | flags | {"special": token["id"] != 2} for token in byte_level_json["added_tokens"]
    ]
    content = byte_level_json | {"added_tokens": added}
    text = "cat <|im_end|>  cat"
    plain = load_tokenizer(directory(content))
    assert plain.special_ids == {0, 1}
    named = {"tokenizer_config.json": {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}}
    tokenizer = load_tokenizer(directory(content, **named))
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode(text) == plain.encode(text) == plain.encode("cat <|im_end|>cat")


@pytest.mark.parametrize("config", [{"vocab_size": 460}, {"text_config": {"vocab_size": 460}}])
def test_ids_that_pad_the_model_have_no_text(config, directory, byte_level_json):
    tokenizer = load_tokenizer(directory(byte_level_json, **{"config.json": config}))
    assert tokenizer.vocab_size == 460
    assert tokenizer.decode([459, *tokenizer.encode("cat")]) == "cat"
    stream = tokenizer.detokenizer()
    assert stream.push([450, 459]) + stream.finish() == ""
    with pytest.raises(ValueError, match="460 is outside the vocabulary, 0 to 459"):
        tokenizer.decode([460])


def test_truncation_and_padding_of_the_training_run_are_off(directory, byte_level_json):
    settings = {
        "truncation": {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    }
    plain = load_tokenizer(directory(byte_level_json)).encode("z" * 20)
    assert len(plain) == 20
    assert load_tokenizer(directory(byte_level_json | settings)).encode("z" * 20) == plain


@pytest.fixture
def gguf_path(tmp_path, byte_level_fields):
    """The small vocabulary written by the gguf package."""
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "gpt2")
    prefix = "tokenizer.ggml."
    writer.add_tokenizer_model(byte_level_fields[prefix + "model"])
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(byte_level_fields[prefix + "tokens"])
    writer.add_token_types(byte_level_fields[prefix + "token_type"])
    writer.add_token_merges(byte_level_fields[prefix + "merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(
        [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    )
    writer.add_tensor("x", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_file_gives_the_ids_of_its_metadata(gguf_path, byte_level_fields):
    tokenizer = load_tokenizer(str(gguf_path))
    other = tokenizer_from_gguf(
        byte_level_fields | {"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_bos_token": True}
    )
    for text in TEXTS:
        assert tokenizer.encode(text) == other.encode(text)
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.apply_chat_template([{"role": "user"}]) == "D"
    assert tokenizer.apply_chat_template([{"role": "user"}], tools=[{}]) == "T"


@pytest.mark.parametrize("length", [0, 3, 30, 200, 3000])
def test_truncated_gguf_is_refused(gguf_path, length):
    gguf_path.write_bytes(gguf_path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"small\.gguf"):
        load_tokenizer(gguf_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", "not a usable tokenizer.json"),
        ("tokenizer.json", "[]", "not a usable tokenizer.json"),
        ("tokenizer.json", '{"model": {"type": "What"}}', "not a usable tokenizer.json"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "no tokens"),
        ("config.json", '{"vocab_size": "x"}', "vocab_size must be a positive integer, got 'x'"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[1]", "must hold a JSON object, got list"),
        ("tokenizer_config.json", '{"eos_token": "<nope>"}', "names eos_token '<nope>', which"),
        ("tokenizer_config.json", '{"eos_token": 7}', "eos_token must be a string or"),
        ("tokenizer_config.json", '{"chat_template": [1]}', "chat_template must be a string or a"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template must be a string or a"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id must be an id or a list"),
        ("generation_config.json", '{"eos_token_id": [-1]}', "eos_token_id must be an id or a"),
        ("config.json", '{"eos_token_id": true}', "eos_token_id must be an id or a list"),
        ("config.json", '{"text_config": {"eos_token_id": 1.5}}', "eos_token_id must be an id"),
    ],
)
def test_damaged_files_are_refused_by_name(name, text, message, directory, byte_level_json):
    path = directory(byte_level_json, **{name: text})
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(path)
    assert name in str(caught.value)


def test_bytes_that_are_no_text_are_refused(directory, byte_level_json):
    path = directory(byte_level_json)
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        load_tokenizer(path)
    (path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"not a usable tokenizer\.json"):
        load_tokenizer(path)


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "model.bin").write_text("x")
    with pytest.raises(ValueError, match=r"neither a directory nor a \.gguf file"):
        load_tokenizer(tmp_path / "model.bin")


def test_tokenizer_json_without_a_decoder_is_refused(directory, byte_level_json):
    with pytest.raises(ValueError, match="no decoder"):
        load_tokenizer(directory(byte_level_json | {"decoder": None}))


def test_ids_of_a_sentencepiece_directory_equal_the_gguf_ones(tmp_path, piece_fields):
    tokenizer = tokenizer_from_gguf(piece_fields)
    content = json.loads(tokenizer._backend.to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    other = load_tokenizer(tmp_path)
    for text in [*TEXTS, "the cat  sat\n<end_of_turn> on <think>"]:
        ids = tokenizer.encode(text)
        assert ids == other.encode(text)
        assert tokenizer.decode(ids) == other.decode(ids)
    assert other.eos_token_ids == tokenizer.eos_token_ids == {2}
    assert other.vocab_size == tokenizer.vocab_size
