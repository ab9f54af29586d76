"""Text of a growing id sequence, handed out as soon as no later id can change it.

In: token ids, in any split. Out: strings whose concatenation equals `Tokenizer.decode` of all the
ids, for every id sequence. The invariant: a returned character is final. What is not final yet is
kept as bytes: the open end of a UTF-8 character (byte-level vocabularies) or an open run of byte
tokens (SentencePiece vocabularies, where one wrong byte turns the whole run into U+FFFD, one per
byte, so that nothing of a run is final before it ends). Each id is looked at once.

The rules are those of the `tokenizers` decoders ByteLevel, and Replace, ByteFallback, Fuse, Strip.
"""

import codecs
import json
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The byte behind each character that byte-level BPE writes for it (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(b): b for b in shown} | {chr(0x100 + n): b for n, b in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_alphabet()


@dataclass(frozen=True)
class DecodingRule:
    """What a vocabulary's decoder does to its pieces, read once from the decoder's own JSON."""

    byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    strip_char: str = ""
    strip_count: int = 0


def decoding_rule(backend: tokenizers.Tokenizer) -> DecodingRule:
    """The rule of `backend`'s decoder; a decoder that is not one of the known chains is refused."""
    if backend.decoder is None:
        raise ValueError(
            "the tokenizer has no decoder, so its ids cannot be turned into text: "
            "tokenizer.json needs a ByteLevel decoder or a Replace/ByteFallback/Fuse sequence"
        )
    stages = _flatten(json.loads(backend.decoder.__getstate__()))
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        return DecodingRule(byte_level=True)
    replaces = [stage for stage in stages if stage["type"] == "Replace"]
    rest = kinds[len(replaces) :]
    strip = stages[-1] if rest[-1:] == ["Strip"] else {"content": "", "start": 0, "stop": 0}
    supported = (
        kinds[: len(replaces)] == ["Replace"] * len(replaces)
        and rest in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"])
        and all(stage["pattern"].get("String") for stage in replaces)
        and strip["stop"] == 0
    )
    if not supported:
        raise ValueError(
            f"decoder {json.dumps(stages, ensure_ascii=False)} is not supported: supported are "
            "ByteLevel, and Replace (of a string), ByteFallback, Fuse, Strip (at the start) in "
            "this order"
        )
    return DecodingRule(
        byte_level=False,
        replacements=tuple((r["pattern"]["String"], r["content"]) for r in replaces),
        strip_char=strip["content"],
        strip_count=strip["start"],
    )


def _flatten(stage: dict) -> list[dict]:
    if stage["type"] == "Sequence":
        return [leaf for part in stage["decoders"] for leaf in _flatten(part)]
    return [stage]


def checked_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    """`ids` as plain ints within the vocabulary, or a ValueError that names the first bad one."""
    checked = []
    for token in ids:
        try:
            token_id = operator.index(token)
        except TypeError as error:
            raise ValueError(f"token ids must be integers, got {token!r}") from error
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"token id {token_id} is outside the vocabulary, 0 to {vocab_size - 1}: these ids "
                "belong to another tokenizer or model"
            )
        checked.append(token_id)
    return checked


class _ByteLevelText:
    """Bytes of each piece, then UTF-8: only the open end of a character waits."""

    def __init__(self):
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, piece: str) -> str:
        try:
            piece_bytes = bytes([_BYTE_OF_CHAR[char] for char in piece])
        except KeyError:  # an added token, which is written as it reads
            piece_bytes = piece.encode()
        return self._utf8.decode(piece_bytes)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceText:
    """Pieces are text already, but for runs of byte tokens, which become text when they end."""

    def __init__(self, rule: DecodingRule):
        self._rule = rule
        self._run = bytearray()

    def push(self, piece: str) -> str:
        for old, new in self._rule.replacements:
            piece = piece.replace(old, new)
        if byte := _BYTE_TOKEN.fullmatch(piece):
            self._run.append(int(byte[1], 16))
            return ""
        return self.finish() + piece

    def finish(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)


class Detokenizer:
    """One stream of text; made by `Tokenizer.detokenizer`, used for one sequence, then dropped."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        rule: DecodingRule,
        vocab_size: int,
        skipped_ids: frozenset[int],
    ):
        self._backend = backend
        self._vocab_size = vocab_size
        self._skipped_ids = skipped_ids
        self._text = _ByteLevelText() if rule.byte_level else _PieceText(rule)
        self._strip_char = rule.strip_char
        self._strip_left = rule.strip_count
        self._finished = False

    def push(self, ids: Sequence[int]) -> str:
        """The text that became final with `ids`; may be empty."""
        if self._finished:
            raise ValueError("push after finish: make a new detokenizer for each sequence")
        texts = []
        for token_id in checked_ids(ids, self._vocab_size):
            if token_id in self._skipped_ids:
                continue
            piece = self._backend.id_to_token(token_id)
            if piece is not None:  # None: an id that the vocabulary leaves free has no text
                texts.append(self._text.push(piece))
        return self._stripped("".join(texts))

    def finish(self) -> str:
        """What was held back, once; empty on a second call."""
        self._finished = True
        return self._stripped(self._text.finish())

    def _stripped(self, text: str) -> str:
        """Drops `strip_char` from the start of the whole text, at most `strip_count` times."""
        while self._strip_left and text:
            if text[0] != self._strip_char:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text
