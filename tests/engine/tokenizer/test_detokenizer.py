"""Streamed text: for any ids and any split, the pieces add up to the whole decode."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tokenizer import Detokenizer, tokenizer_from_gguf
from engine.tokenizer.detokenizer import decoding_rule


@pytest.fixture(scope="module")
def bpe(byte_level_fields):
    return tokenizer_from_gguf(byte_level_fields)


@pytest.fixture(scope="module")
def spm(piece_fields):
    return tokenizer_from_gguf(piece_fields)


@pytest.fixture(scope="module")
def spm_plain(piece_fields):
    """Without the space in front, as Gemma."""
    return tokenizer_from_gguf(piece_fields | {"tokenizer.ggml.add_space_prefix": False})


def byte_chars() -> dict[int, str]:
    """How byte-level BPE writes each byte, asked of the library, not of the code under test."""
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    chars = {byte: chr(byte) for byte in [0xC0, 0xC1, *range(0xF5, 0x100)]}  # never in UTF-8
    for text in map(
        chr, [*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000)]
    ):
        chars |= dict(zip(text.encode(), level.pre_tokenize_str(text)[0][0], strict=True))
    assert sorted(chars.values()) == sorted(level.alphabet())
    return chars


BYTE_CHARS = byte_chars()


def byte_ids(tokenizer, data: bytes) -> list[int]:
    """One id per byte, in either kind of vocabulary."""
    vocab = tokenizer._backend.get_vocab()
    if "<0x00>" in vocab:
        return [vocab[f"<0x{byte:02X}>"] for byte in data]
    return [vocab[BYTE_CHARS[byte]] for byte in data]


def one_id(tokenizer, piece: str) -> int:
    return tokenizer._backend.token_to_id(piece)


def stream(tokenizer, ids, sizes=(1,), skip_special_tokens=True) -> tuple[list[str], str]:
    """Deltas of pushes of the given sizes, in turn, and what finish gives."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens)
    deltas, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        deltas.append(detokenizer.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return deltas, detokenizer.finish()


@pytest.mark.parametrize("kind", ["bpe", "spm", "spm_plain"])
@given(data=st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_deltas_add_up_for_any_ids_and_any_split(kind, data, bpe, spm, spm_plain):
    tokenizer = {"bpe": bpe, "spm": spm, "spm_plain": spm_plain}[kind]
    # Low ids are special tokens and bytes: half of the draws, so that runs and cuts are frequent.
    some_id = st.integers(0, 262) | st.integers(0, tokenizer.vocab_size - 1)
    ids = data.draw(st.lists(some_id, max_size=30))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    skip = data.draw(st.booleans())
    deltas, rest = stream(tokenizer, ids, sizes, skip)
    assert "".join(deltas) + rest == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["bpe", "spm", "spm_plain"])
@given(data=st.binary(max_size=12), space=st.integers(0, 12))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_bytes_stream_as_the_whole(kind, data, space, bpe, spm, spm_plain):
    tokenizer = {"bpe": bpe, "spm": spm, "spm_plain": spm_plain}[kind]
    ids = [*byte_ids(tokenizer, data[:space]), 260, *byte_ids(tokenizer, data[space:])]
    deltas, rest = stream(tokenizer, ids)
    assert "".join(deltas) + rest == tokenizer.decode(ids)


@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (4,)])
@pytest.mark.parametrize("kind", ["bpe", "spm"])
def test_b34_emoji_split_over_tokens(kind, sizes, bpe, spm):
    tokenizer = {"bpe": bpe, "spm": spm}[kind]
    ids = byte_ids(tokenizer, "😀".encode())
    deltas, rest = stream(tokenizer, ids, sizes)
    assert "".join(deltas) + rest == "😀"
    assert "\ufffd" not in "".join(deltas)
    assert all(delta == "" for delta in deltas[:-1])
    # A byte-level character is final with its last byte; a byte run only when something follows.
    assert (rest == "") == (kind == "bpe")


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_b34_emoji_cut_off_is_flushed_once(cut, bpe, spm):
    for tokenizer, whole in ((bpe, "\ufffd"), (spm, "\ufffd" * cut)):
        ids = byte_ids(tokenizer, "😀".encode()[:cut])
        detokenizer = tokenizer.detokenizer()
        assert [detokenizer.push([token]) for token in ids] == [""] * cut
        assert detokenizer.finish() == whole == tokenizer.decode(ids)
        assert detokenizer.finish() == ""


def test_b34_space_token_inside_an_emoji(bpe, spm_plain):
    for tokenizer, space in ((bpe, one_id(bpe, "Ġ")), (spm_plain, one_id(spm_plain, "▁"))):
        emoji = byte_ids(tokenizer, "😀".encode())
        ids = [*emoji[:2], space, *emoji[2:], space]
        deltas, rest = stream(tokenizer, ids)
        assert "".join(deltas) + rest == tokenizer.decode(ids)
        assert deltas[:2] == ["", ""]
        assert deltas[2].endswith(" ")


def test_b34_special_token_inside_an_emoji_is_skipped(bpe, spm):
    for tokenizer in (bpe, spm):
        emoji = byte_ids(tokenizer, "😀".encode())
        ids = [*emoji[:2], 2, *emoji[2:]]
        deltas, rest = stream(tokenizer, ids)
        assert "".join(deltas) + rest == "😀"
        deltas, rest = stream(tokenizer, ids, skip_special_tokens=False)
        assert "".join(deltas) + rest == tokenizer.decode(ids, skip_special_tokens=False) != "😀"


def test_b36_leading_space_is_taken_once_and_only_by_sentencepiece(bpe, spm, spm_plain):
    ids = bpe.encode(" a")
    assert "".join(stream(bpe, ids)[0]) == bpe.decode(ids) == " a"
    space, letter = one_id(spm, "▁"), one_id(spm, "t")
    for count in range(4):
        ids = [space] * count + [letter]
        expected = " " * count + "t"
        deltas, rest = stream(spm_plain, ids)
        assert "".join(deltas) + rest == spm_plain.decode(ids) == expected
        deltas, rest = stream(spm, ids)
        assert "".join(deltas) + rest == spm.decode(ids) == expected[min(count, 1) :]


def test_b36_leading_space_stays_taken_after_empty_pushes(spm):
    detokenizer = spm.detokenizer()
    space, letter = one_id(spm, "▁"), one_id(spm, "t")
    assert spm.decode([space]) == ""
    deltas = [detokenizer.push(ids) for ids in ([], [1], [space], [], [space], [letter], [space])]
    assert deltas == ["", "", "", "", " ", "t", " "]


@pytest.mark.parametrize("text", ["    .", "he said n't ", "a , b", "x ' s", "? !"])
def test_b37_text_is_append_only(text, bpe, spm_plain):
    for tokenizer in (bpe, spm_plain):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        for k in range(len(ids)):
            assert text.startswith(tokenizer.decode(ids[:k]).rstrip("\ufffd"))


def test_b40_newline_byte_token_is_a_newline(spm):
    newline = byte_ids(spm, b"\n")
    assert spm.encode("\n", add_special_tokens=False)[-1:] == newline
    deltas, rest = stream(spm, [*newline, *newline, one_id(spm, "t")])
    assert deltas == ["", "", "\n\nt"]
    assert rest == ""


def test_added_tokens_are_written_as_they_read(byte_level_fields):
    """Their text is no byte alphabet: spaces and characters of several bytes stand in it."""
    added = ["<two words>", "<你好>", "éé"]
    tokenizer = tokenizer_from_gguf(
        byte_level_fields
        | {
            "tokenizer.ggml.tokens": [*byte_level_fields["tokenizer.ggml.tokens"], *added],
            "tokenizer.ggml.token_type": [*byte_level_fields["tokenizer.ggml.token_type"], 4, 4, 4],
        }
    )
    ids = tokenizer.encode("the<你好><two words> éé")
    assert {450, 451, 452} <= set(ids)
    deltas, rest = stream(tokenizer, ids[:-1])
    assert "".join(deltas) + rest == tokenizer.decode(ids[:-1]) == "the<你好><two words> "
    # The library reads "éé" as the bytes E9 E9, so it does here too.
    deltas, rest = stream(tokenizer, ids)
    assert "".join(deltas) + rest == tokenizer.decode(ids)


def test_one_look_per_id(bpe):
    """The cost of a push does not grow with what came before it."""

    class Counting:
        looks = 0

        def id_to_token(self, token_id):
            self.looks += 1
            return bpe._backend.id_to_token(token_id)

    backend = Counting()
    rule = decoding_rule(bpe._backend)
    detokenizer = Detokenizer(backend, rule, bpe.vocab_size, frozenset({0}))
    for _ in range(100):
        detokenizer.push([0, 5, 300])
    assert backend.looks == 200


def test_ids_are_checked(bpe):
    for bad, message in (
        ([450], "450 is outside the vocabulary, 0 to 449"),
        ([-1], "-1 is outside"),
        ([1.0], "must be integers, got 1.0"),
        (["a"], "must be integers, got 'a'"),
        ([None], "must be integers, got None"),
    ):
        with pytest.raises(ValueError, match=message):
            bpe.detokenizer().push(bad)
        with pytest.raises(ValueError, match=message):
            bpe.decode(bad)


def test_push_after_finish_is_refused(bpe):
    detokenizer = bpe.detokenizer()
    detokenizer.finish()
    with pytest.raises(ValueError, match="new detokenizer"):
        detokenizer.push([5])


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 0, "stop": 1},
            ],
        },
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"Regex": "x+"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
    ],
)
def test_decoders_that_cannot_be_streamed_are_refused(decoder, byte_level_json):
    content = json.dumps(byte_level_json | {"decoder": decoder})
    with pytest.raises(ValueError, match="decoder"):
        decoding_rule(tokenizers.Tokenizer.from_str(content))
