"""Tokenizers from GGUF metadata give the ids of the equivalent tokenizer.json, or of an oracle."""

import itertools
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tokenizer import tokenizer_from_gguf
from tests.engine.tokenizer import small

SPLITTINGS = list(small.PUBLISHED)
TEXTS = [
    "",
    " a",
    "  ",
    "12345 and 2024",
    "x12345y",
    "the cat's HTTPServer, they'LL",
    "naïve café — 😀😀",
    "cafe\u0301 e\u0301",
    "a\r\nb\r\n\r\n",
    "\t\t x\n\n\n  y ",
    "你好，世界 привет",
    "def f(x):\n    return x + 1  # done!!!\n",
    "x;\n/y",
    "hi <|im_start|>user\n<|im_end|> there",
    "ab" * 300,
]


def reference(content: dict) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_b94_splitting_gives_the_ids_of_tokenizer_json(pre, byte_level_json, byte_level_fields):
    backend = reference(small.published(byte_level_json, pre))
    fields = byte_level_fields | {"tokenizer.ggml.pre": pre}
    tokenizer = tokenizer_from_gguf(fields)
    for text in TEXTS:
        assert tokenizer.encode(text) == backend.encode(text).ids, text
        for ids in (tokenizer.encode(text), list(range(0, 450, 7))):
            assert tokenizer.decode(ids) == backend.decode(ids)


def test_b94_the_texts_tell_the_splittings_apart(byte_level_fields):
    """Else the test above could not see a wrong splitting."""
    ids = {}
    for pre in SPLITTINGS:
        tokenizer = tokenizer_from_gguf(byte_level_fields | {"tokenizer.ggml.pre": pre})
        ids[pre] = str([tokenizer.encode(text, add_special_tokens=False) for text in TEXTS])
    same = {frozenset(("llama-bpe", "dbrx"))}  # these two differ in whole words only, see below
    for first in SPLITTINGS:
        for second in SPLITTINGS:
            if first != second and frozenset((first, second)) not in same:
                assert ids[first] != ids[second], (first, second)


def test_b94_llama3_takes_whole_words_before_merges(byte_level_fields):
    """A token that no merge makes is found by llama-bpe, not by dbrx."""
    fields = byte_level_fields | {
        "tokenizer.ggml.tokens": [*byte_level_fields["tokenizer.ggml.tokens"], "Ġzqzqz"],
        "tokenizer.ggml.token_type": [*byte_level_fields["tokenizer.ggml.token_type"], 1],
    }
    whole = tokenizer_from_gguf(fields | {"tokenizer.ggml.pre": "llama-bpe"})
    merged = tokenizer_from_gguf(fields | {"tokenizer.ggml.pre": "dbrx"})
    assert whole.encode(" zqzqz") == [450]
    assert len(merged.encode(" zqzqz")) > 1


@given(text=st.text(max_size=40))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_byte_level_text_survives_encode_and_decode(text, byte_level_fields):
    tokenizer = tokenizer_from_gguf(byte_level_fields)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def greedy_pieces(text: str, fields: dict, prefix: bool) -> list[int]:
    """SentencePiece's own algorithm: join the neighbours of best score, the leftmost of equals.

    User-defined pieces are taken whole first, the longest at each place.
    """
    tokens = [t.replace(" ", "▁") for t in fields["tokenizer.ggml.tokens"]]
    ids = {token: n for n, token in enumerate(tokens)}
    kinds, scores = fields["tokenizer.ggml.token_type"], fields["tokenizer.ggml.scores"]
    whole = sorted((t for t, k in zip(tokens, kinds, strict=True) if k == 4), key=len, reverse=True)
    rest = text.replace(" ", "▁")
    rest = "▁" + rest if prefix and rest else rest
    symbols = []  # (text, may be joined)
    while rest:
        found = next((t for t in whole if rest.startswith(t)), None)
        symbols.append((found, False) if found else (rest[0], True))
        rest = rest[len(symbols[-1][0]) :]
    while True:
        best = None
        for at, (left, right) in enumerate(itertools.pairwise(symbols)):
            joined = left[0] + right[0]
            if not (left[1] and right[1] and kinds[ids.get(joined, 0)] == 1):
                continue
            if best is None or scores[ids[joined]] > best[0]:
                best = (scores[ids[joined]], at, joined)
        if best is None:
            break
        symbols[best[1] : best[1] + 2] = [(best[2], True)]
    out = []
    for symbol, _ in symbols:
        known = [ids[symbol]] if symbol in ids else [ids[f"<0x{b:02X}>"] for b in symbol.encode()]
        out += known
    return out


@pytest.mark.parametrize("prefix", [True, False])
@given(text=st.text(alphabet="thecaosdn '.,1245é😀你\n\t▁", max_size=30))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_b94_pieces_are_those_of_the_sentencepiece_algorithm(prefix, text, piece_fields):
    # A run of spaces in front joins the prefix space in one piece: the run then counts one more.
    tokenizer = tokenizer_from_gguf(
        piece_fields
        | {"tokenizer.ggml.add_space_prefix": prefix, "tokenizer.ggml.add_bos_token": False}
    )
    if "▁▁" not in text:  # in text this is the added token, in the algorithm a run of spaces
        assert tokenizer.encode(text) == greedy_pieces(text, piece_fields, prefix)


def test_b94_runs_of_spaces_of_every_length(piece_fields):
    tokenizer = tokenizer_from_gguf(piece_fields | {"tokenizer.ggml.add_space_prefix": False})
    one, two, three, four = (tokenizer._backend.token_to_id("▁" * n) for n in (1, 2, 3, 4))
    expected = {
        1: [one],
        2: [two],
        3: [three],
        4: [four],
        5: [four, one],
        6: [four, two],
        8: [four, four],
    }
    for count, ids in expected.items():
        assert tokenizer.encode(" " * count, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == " " * count


def test_b94_special_token_text_in_user_text_is_the_token(piece_fields):
    tokenizer = tokenizer_from_gguf(piece_fields)
    tokens = piece_fields["tokenizer.ggml.tokens"]
    end, think = tokens.index("<end_of_turn>"), tokens.index("<think>")
    ids = tokenizer.encode("a<end_of_turn><think>")
    assert ids[-2:] == [end, think]
    # Control tokens are skipped in text, user-defined ones are not.
    assert tokenizer.special_ids == {0, 1, 2, end}
    assert tokenizer.decode(ids) == "a<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s> a<end_of_turn><think>"


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, [1, "x"]),  # absent flags: SentencePiece kinds begin with BOS
        ({"add_bos_token": False}, ["x"]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, "x", 2]),
        ({"add_bos_token": False, "add_eos_token": True}, ["x", 2]),
        ({"bos_token_id": 2, "add_bos_token": True}, [2, "x"]),
    ],
)
def test_b94_bos_and_eos_flags(changes, ids, piece_fields):
    fields = piece_fields | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    tokenizer = tokenizer_from_gguf(fields)
    body = tokenizer.encode("x", add_special_tokens=False)
    expected = [token for part in ids for token in (body if part == "x" else [part])]
    assert tokenizer.encode("x") == expected
    assert tokenizer.encode("") == [token for token in ids if token != "x"]


def test_b94_absent_flags_and_ids(piece_fields, byte_level_fields):
    without = {k: v for k, v in piece_fields.items() if not k.endswith("_token_id")}
    tokenizer = tokenizer_from_gguf(without)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})
    assert tokenizer.pad_token_id is None
    del (fields := dict(byte_level_fields))["tokenizer.ggml.add_bos_token"]
    assert tokenizer_from_gguf(fields).encode("a") == tokenizer_from_gguf(fields).encode("a", False)
    llama = tokenizer_from_gguf(fields | {"tokenizer.ggml.pre": "llama-bpe"})
    assert llama.encode("a")[0] == llama.bos_token_id == 1
    del fields["tokenizer.ggml.bos_token_id"]
    with pytest.raises(ValueError, match=r"adds a BOS token .* no tokenizer\.ggml\.bos_token_id"):
        tokenizer_from_gguf(fields | {"tokenizer.ggml.pre": "llama-bpe"})


def test_b30_every_end_id_of_the_file(byte_level_fields):
    fields = byte_level_fields | {
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.eom_token_id": 7,
    }
    assert tokenizer_from_gguf(fields).eos_token_ids == {0, 2, 7}
    assert tokenizer_from_gguf(byte_level_fields).eos_token_ids == {2}


def test_unused_ids_have_no_text_and_count(byte_level_fields):
    fields = byte_level_fields | {
        "tokenizer.ggml.tokens": [*byte_level_fields["tokenizer.ggml.tokens"], "[PAD450]", ""],
        "tokenizer.ggml.token_type": [*byte_level_fields["tokenizer.ggml.token_type"], 5, 1],
    }
    tokenizer = tokenizer_from_gguf(fields)
    assert tokenizer.vocab_size == 452
    assert tokenizer.decode([451, 450, *tokenizer.encode("cat"), 450]) == "cat"
    stream = tokenizer.detokenizer()
    assert stream.push([450, 451]) + stream.finish() == ""


def test_phi3_markers_swallow_the_white_space_after_them(piece_fields):
    text = "<end_of_turn>\n the"
    plain = tokenizer_from_gguf(piece_fields).encode(text)
    phi3 = tokenizer_from_gguf(piece_fields | {"general.architecture": "phi3"})
    assert phi3.encode(text) == phi3.encode("<end_of_turn>the") != plain
    assert phi3.encode("<s>  the") == tokenizer_from_gguf(piece_fields).encode("<s>  the")


def without(key):
    return lambda fields: {k: v for k, v in fields.items() if k != f"tokenizer.ggml.{key}"}


def with_(key, value):
    return lambda fields: fields | {f"tokenizer.ggml.{key}": value}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model"), "tokenizer.ggml.model is missing"),
        (without("tokens"), "tokenizer.ggml.tokens is missing"),
        (without("token_type"), "tokenizer.ggml.token_type is missing"),
        (without("merges"), "tokenizer.ggml.merges is missing"),
        (without("pre"), "tokenizer.ggml.pre is missing"),
        (with_("pre", "default"), "tokenizer.ggml.pre 'default' is not supported"),
        (with_("pre", "gpt-5"), "tokenizer.ggml.pre 'gpt-5' is not supported.*qwen2"),
        (with_("model", "bert"), "tokenizer.ggml.model 'bert' is not supported"),
        (with_("model", "t5"), "'t5' is not supported"),
        (with_("model", 3), "tokenizer.ggml.model is a int"),
        (with_("tokens", "abc"), "tokenizer.ggml.tokens is a str"),
        (with_("tokens", [1, 2]), "tokenizer.ggml.tokens holds 1, which is of the wrong type"),
        (with_("merges", [1]), "tokenizer.ggml.merges holds 1"),
        (with_("token_type", [1.5] * 450), "token_type holds 1.5"),
        (
            lambda fields: fields | {"tokenizer.chat_template": 7},
            "tokenizer.chat_template is a int",
        ),
        (with_("token_type", [1, 1]), "token_type has 2 entries for 450 tokens"),
        (with_("merges", ["a"]), "do not fit together"),
        (with_("merges", ["a ?!?"]), "do not fit together"),
        (with_("eos_token_id", 450), "eos_token_id is 450, not an id from 0 to 449"),
        (with_("bos_token_id", -1), "bos_token_id is -1"),
        (with_("bos_token_id", 1.5), "bos_token_id is 1.5"),
        (with_("add_bos_token", 2), "add_bos_token must be true or false, got 2"),
    ],
)
def test_b94_bad_metadata_is_refused_by_name(change, message, byte_level_fields):
    with pytest.raises(ValueError, match=message):
        tokenizer_from_gguf(change(byte_level_fields))


def test_bad_piece_metadata_is_refused(piece_fields):
    tokens = list(piece_fields["tokenizer.ggml.tokens"])
    with pytest.raises(ValueError, match=r"scores has 1 entries"):
        tokenizer_from_gguf(with_("scores", [0.0])(piece_fields))
    with pytest.raises(ValueError, match="scores is missing"):
        tokenizer_from_gguf(without("scores")(piece_fields))
    with pytest.raises(ValueError, match="unknown_token_id"):
        tokenizer_from_gguf(with_("unknown_token_id", 10**6)(piece_fields))
    with pytest.raises(ValueError, match="'<s>' stands twice in the file: 1, 2"):
        tokenizer_from_gguf(with_("tokens", ["<unk>", "<s>", "<s>", *tokens[3:]])(piece_fields))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\ud800b", r"unpaired surrogate U\+D800 at character 1"),
        (b"bytes", "must be a str, got bytes"),
        (None, "must be a str, got NoneType"),
    ],
)
def test_text_that_is_no_text_is_refused(text, message, byte_level_fields):
    with pytest.raises(ValueError, match=message):
        tokenizer_from_gguf(byte_level_fields).encode(text)
