"""A tokenizer from the metadata of a GGUF file.

In: metadata key -> Python value, whoever read the file. Out: `Tokenizer` whose ids equal those of
the HF tokenizer of the same model. Two kinds (`tokenizer.ggml.model`) are built, as the equivalent
`tokenizers` pipeline:

- "gpt2", byte-level BPE: the file has tokens and merges, and names the splitting of text into
  words only (`tokenizer.ggml.pre`). A name that is not in the table is refused: a wrong splitting
  gives plausible, wrong ids.
- "llama", SentencePiece BPE: the file has tokens and scores; the merges follow from them.

Other kinds are refused by name. Defaults for absent keys are llama.cpp's, which reads the same
files; key names and token types are from the GGUF specification.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.tokenizer.tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_SPACE = "\u2581"  # how SentencePiece writes a space inside a piece

# Word patterns, as the model authors publish them in tokenizer.json.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)


@dataclass(frozen=True)
class _Splitting:
    """What a `tokenizer.ggml.pre` name stands for.

    `pattern` None is GPT-2's own; `whole_words` takes a word that is a token as it is, whatever the
    merges say; `adds_bos` holds where the file has no add_bos_token.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_LLAMA3 = _Splitting(_WORDS % "{1,3}", whole_words=True, adds_bos=True)
_SPLITTINGS = {
    "gpt-2": _Splitting(),
    "smollm": _Splitting(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _Splitting(_WORDS % "{1,3}"),  # OLMo 2
    "qwen2": _Splitting(_WORDS % "", nfc=True),
    "tekken": _Splitting(_TEKKEN, whole_words=True, adds_bos=True),
}


def tokenizer_from_gguf(fields: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes (`tokenizer.*` and the architecture)."""
    kind = _required(fields, "tokenizer.ggml.model", str)
    tokens = _listed(fields, "tokenizer.ggml.tokens", str)
    types = _listed(fields, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens) or not tokens:
        raise ValueError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    if kind == "gpt2":
        backend, adds_bos = _byte_level(fields, tokens, types)
    elif kind == "llama":
        tokens = _respelled(tokens, types)
        backend, adds_bos = _sentencepiece(fields, tokens, types)
    else:
        raise ValueError(
            f"tokenizer.ggml.model {kind!r} is not supported; supported are 'gpt2' and 'llama'"
        )
    _add_tokens(backend, tokens, types, fields.get("general.architecture"))
    ids = _special_ids(fields, kind, len(tokens))
    _set_bos_eos(backend, fields, tokens, ids, adds_bos)
    return Tokenizer(
        backend,
        vocab_size=len(tokens),
        special_tokens={
            f"{name}_token": tokens[ids[name]]
            for name in ("bos", "eos", "unk", "pad")
            if ids[name] is not None
        },
        eos_token_ids={ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None},
        chat_templates=_chat_templates(fields),
    )


def _required(fields: Mapping[str, object], key: str, kind: type):
    value = fields.get(key)
    if not isinstance(value, kind):
        state = "is missing" if value is None else f"is a {type(value).__name__}"
        raise ValueError(f"GGUF metadata: {key} {state}, so the file holds no usable tokenizer")
    return value


def _listed(fields: Mapping[str, object], key: str, kind: type | tuple[type, ...]) -> list:
    values = _required(fields, key, list)
    for value in values:
        if not isinstance(value, kind):
            raise ValueError(f"GGUF metadata: {key} holds {value!r}, which is of the wrong type")
    return values


def _vocabulary(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Text to id. Unused ids (padding up to a round number) and empty tokens have no text."""
    vocab = {}
    for token_id, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _UNUSED or not text:
            continue
        if text in vocab:
            raise ValueError(f"token {text!r} stands twice in the file: {vocab[text]}, {token_id}")
        vocab[text] = token_id
    return vocab


def _built(model_kind: type, **arguments) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(model_kind(**arguments))
    except Exception as error:  # the library raises plain Exception, for a merge of unknown parts
        raise ValueError(f"the file's tokens and merges do not fit together: {error}") from error


def _byte_level(fields, tokens, types) -> tuple[tokenizers.Tokenizer, bool]:
    name = _required(fields, "tokenizer.ggml.pre", str)
    if name not in _SPLITTINGS:
        raise ValueError(
            f"tokenizer.ggml.pre {name!r} is not supported (another splitting would give wrong "
            f"ids); supported are {sorted(_SPLITTINGS)}"
        )
    splitting = _SPLITTINGS[name]
    merges = [tuple(m.split(" ", 1)) for m in _listed(fields, "tokenizer.ggml.merges", str)]
    backend = _built(
        models.BPE,
        vocab=_vocabulary(tokens, types),
        merges=merges,
        ignore_merges=splitting.whole_words,
    )
    stages = []
    if splitting.single_digits:
        stages.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        stages.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    own_words = splitting.pattern is None
    stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(stages)
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, splitting.adds_bos


def _respelled(tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    """Runs of spaces are pieces like any other, but the file writes user-defined ones as spaces."""
    return [
        _SPACE * len(text) if kind == _USER_DEFINED and text and not text.strip(" ") else text
        for text, kind in zip(tokens, types, strict=True)
    ]


def _sentencepiece(fields, tokens, types) -> tuple[tokenizers.Tokenizer, bool]:
    scores = _listed(fields, "tokenizer.ggml.scores", (int, float))
    if len(scores) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
        )
    vocab = _vocabulary(tokens, types)
    has_bytes = _BYTE in types
    unknown_id = fields.get("tokenizer.ggml.unknown_token_id", 0)
    backend = _built(
        models.BPE,
        vocab=vocab,
        merges=_merges(vocab, scores, types),
        unk_token=tokens[_checked_id(unknown_id, "unknown_token_id", len(tokens))],
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    add_prefix = _flag(fields, "tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Replace(" ", _SPACE)]
    texts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_prefix:
        steps.insert(0, normalizers.Prepend(_SPACE))
        texts.append(decoders.Strip(content=" ", left=1, right=0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(texts)
    return backend, True


def _merges(
    vocab: dict[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, best score first, then longest left, longest right.

    Added tokens count as score 0, above all others: the file has a filler score for them, but
    SentencePiece takes them whole before it merges anything.
    """
    ranked = []
    for text, token_id in vocab.items():
        score = 0.0 if types[token_id] in (_CONTROL, _USER_DEFINED) else scores[token_id]
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, -cut, cut - len(text), left, right))
    ranked.sort(key=operator.itemgetter(0, 1, 2))  # stable: equal ranks stay in the order of ids
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(backend, tokens, types, architecture) -> None:
    """Marks the tokens that are found in text before anything else; control ones are special."""
    special, plain = [], []
    for text, kind in zip(tokens, types, strict=True):
        if not text or kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            continue
        # Phi-3's markers swallow the white space that follows them; no key in the file says so.
        strips = architecture == "phi3" and text not in ("<unk>", "<s>", "<|endoftext|>")
        is_special = kind != _USER_DEFINED
        token = AddedToken(text, special=is_special, normalized=False, rstrip=strips)
        (special if is_special else plain).append(token)
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _special_ids(fields, kind: str, vocab_size: int) -> dict[str, int | None]:
    defaults = {"bos": 1, "eos": 2, "unk": 0} if kind == "llama" else {}
    keys = {
        "bos": "bos_token_id",
        "eos": "eos_token_id",
        "eot": "eot_token_id",
        "eom": "eom_token_id",
        "unk": "unknown_token_id",
        "pad": "padding_token_id",
    }
    ids = {}
    for name, key in keys.items():
        value = fields.get(f"tokenizer.ggml.{key}", defaults.get(name))
        ids[name] = None if value is None else _checked_id(value, key, vocab_size)
    return ids


def _checked_id(value: object, key: str, vocab_size: int) -> int:
    if type(value) is not int or not 0 <= value < vocab_size:
        raise ValueError(f"tokenizer.ggml.{key} is {value!r}, not an id from 0 to {vocab_size - 1}")
    return value


def _flag(fields: Mapping[str, object], key: str, default: bool) -> bool:
    value = fields.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value


def _set_bos_eos(backend, fields, tokens, ids, adds_bos: bool) -> None:
    before, after = [], []
    if _flag(fields, "tokenizer.ggml.add_bos_token", adds_bos):
        before.append("bos")
    if _flag(fields, "tokenizer.ggml.add_eos_token", False):
        after.append("eos")
    used = before + after
    for name in used:
        if ids[name] is None:
            raise ValueError(
                f"the file adds a {name.upper()} token to every text, but has no "
                f"tokenizer.ggml.{name}_token_id"
            )
    if used:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=[(name, ids[name]) for name in used]
        )


def _chat_templates(fields: Mapping[str, object]) -> dict[str, str]:
    """`tokenizer.chat_template`, and further ones under `tokenizer.chat_template.NAME`."""
    prefix = "tokenizer.chat_template"
    templates = {}
    for key in fields:
        if key == prefix or key.startswith(prefix + "."):
            name = key.removeprefix(prefix).removeprefix(".") or "default"
            templates[name] = _required(fields, key, str)
    return templates
