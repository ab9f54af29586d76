"""Small vocabularies of both kinds, as tokenizer.json (the reference) and as GGUF metadata.

Merges are learned on whole lines, across words, so that a wrong splitting into words changes ids.
"""

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

LINES = [
    "the cat sat on the mat, the dog's 12345 days didn't end in 2024.",
    "the cat sat on the hat; they'LL see 12345 more HTTPServer requests.",
    "def f(x):\n    return x + 1\r\n\n\n    # done!!! (really)",
    "naïve café — déjà vu 😀😀 你好，世界 привет мир",
    "a;\n/b;\n/c;\n/d;\n/ and http://d.e/f",
    "  two spaces, tabs\t\tand   runs    of     them\n\n\nend",
]
# What published tokenizer.json files of each splitting hold, in their own words.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> dict:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _bytes(use_regex: bool) -> dict:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


# tokenizer.ggml.pre -> (normalizer, pre-tokenizer, ignore_merges) of tokenizer.json
PUBLISHED = {
    "gpt-2": (None, _bytes(True), False),
    "smollm": (
        None,
        {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, _bytes(True)],
        },
        False,
    ),
    "llama-bpe": (
        None,
        {"type": "Sequence", "pretokenizers": [_split(LLAMA3_PATTERN), _bytes(False)]},
        True,
    ),
    "dbrx": (
        None,
        {"type": "Sequence", "pretokenizers": [_split(LLAMA3_PATTERN), _bytes(False)]},
        False,
    ),
    "qwen2": (
        {"type": "NFC"},
        {"type": "Sequence", "pretokenizers": [_split(QWEN2_PATTERN), _bytes(False)]},
        False,
    ),
    "tekken": (
        None,
        {"type": "Sequence", "pretokenizers": [_split(TEKKEN_PATTERN), _bytes(False)]},
        True,
    ),
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_json() -> dict:
    """Byte-level BPE as tokenizer.json, 450 ids, GPT-2 splitting; special tokens are ids 0 to 2."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=450,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    content = json.loads(backend.to_str())
    content["pre_tokenizer"] = PUBLISHED["gpt-2"][1]
    return content


def byte_level_fields(byte_level_json: dict) -> dict:
    """The same vocabulary as GGUF metadata with pre "gpt-2" and no BOS."""
    tokens = sorted(byte_level_json["model"]["vocab"], key=byte_level_json["model"]["vocab"].get)
    return {
        "general.architecture": "gpt2",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(m) for m in byte_level_json["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def published(content: dict, pre: str) -> dict:
    """`content` as tokenizer.json of a model with that splitting."""
    normalizer, pre_tokenizer, ignore_merges = PUBLISHED[pre]
    model = content["model"] | {"ignore_merges": ignore_merges}
    changes = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model}
    return content | changes


def piece_fields() -> dict:
    """A SentencePiece vocabulary as GGUF metadata: specials, bytes, added, merged, letters.

    A piece's score is minus its place, as SentencePiece writes BPE; the user-defined runs of spaces
    have the filler score that GGUF converters give to added tokens.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    backend.train_from_iterator(LINES, trainer)
    learned = backend.get_vocab()
    absent = set("😀你\n\r\t")  # characters that only bytes can write
    pieces = [t for t in sorted(learned, key=learned.get) if not absent & set(t)]
    merged = [t for t in pieces if len(t) > 1 and set(t) != {"▁"}]
    letters = [t for t in pieces if len(t) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    scores = [0.0] * len(tokens)
    for added in ("  ", "   ", "    ", "<end_of_turn>", "<think>"):
        tokens.append(added)
        types.append(3 if added == "<end_of_turn>" else 4)
        scores.append(-1000.0)
    tokens += merged + letters
    types += [1] * (len(merged) + len(letters))
    scores += [-float(rank) for rank in range(len(merged) + len(letters))]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
