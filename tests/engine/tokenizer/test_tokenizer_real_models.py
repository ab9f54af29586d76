"""Two real vocabularies, 49,152 and 262,144 tokens, against stored ids of the HF tokenizers."""

import json
import random
from pathlib import Path

import pytest

from engine.tokenizer import load_tokenizer
from models.checkpoint.registry import fetch

MODELS = ["smollm2-135m", "gemma3-270m"]
GOLDENS = json.loads((Path(__file__).parent / "goldens.json").read_text())

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return request.param, load_tokenizer(fetch(request.param))


def test_b94_ids_equal_the_hf_tokenizer(model):
    name, tokenizer = model
    assert len(GOLDENS[name]) > 30
    for row in GOLDENS[name]:
        assert tokenizer.encode(row["text"]) == row["ids"], row["text"]


def test_b94_text_survives(model):
    name, tokenizer = model
    for row in GOLDENS[name]:
        # In Gemma's text a written U+2581 is a space, by SentencePiece's rule.
        text = row["text"].replace("▁", " ") if name == "gemma3-270m" else row["text"]
        ids = tokenizer.encode(row["text"], add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_b30_ends_and_other_special_ids(model):
    name, tokenizer = model
    found = (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id)
    if name == "smollm2-135m":
        assert (*found, tokenizer.vocab_size) == (1, {2}, 2, 49152)
        assert len(tokenizer.special_ids) == 17
    else:
        assert (*found, tokenizer.vocab_size) == (2, {1}, 0, 262144)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_deltas_add_up_for_random_ids(skip_special_tokens, model):
    _, tokenizer = model
    draw = random.Random(0)
    for _ in range(300):
        # Special tokens, bytes and short pieces lie at the start of both vocabularies.
        ids = [
            draw.randrange(tokenizer.vocab_size if draw.random() < 0.4 else 500) for _ in range(40)
        ]
        stream, text, at = tokenizer.detokenizer(skip_special_tokens), "", 0
        while at < len(ids):
            size = draw.randint(1, 4)
            text += stream.push(ids[at : at + size])
            at += size
        assert text + stream.finish() == tokenizer.decode(ids, skip_special_tokens)


def test_b34_text_of_the_goldens_streams(model):
    name, tokenizer = model
    for row in GOLDENS[name]:
        stream = tokenizer.detokenizer()
        deltas = [stream.push([token]) for token in row["ids"]]
        assert "".join(deltas) + stream.finish() == tokenizer.decode(row["ids"])
        if "\ufffd" not in row["text"]:
            assert "\ufffd" not in "".join(deltas)


def test_b93_chat(model):
    name, tokenizer = model
    messages = [{"role": "user", "content": "Hi 😀"}]
    if name == "gemma3-270m":
        with pytest.raises(ValueError, match="no chat template"):
            tokenizer.encode_chat(messages)
        return
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi 😀<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(messages) == prompt
    ids = tokenizer.encode_chat(messages)
    assert ids == tokenizer.encode(prompt, add_special_tokens=False)
    assert ids[:2] == [1, 9690]  # <|im_start|> once, then "system"
