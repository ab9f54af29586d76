"""Write what transformers computes with the registry's real models, as stored goldens.

    python -m tests.parity.make_real tests/parity/goldens

(needs torch and transformers). transformers reads the same GGUF file with its own reader, so its
weights and sizes do not come from our loader. `real_NAME.json` lists, for each of ten prompts, its
token ids (the first 700), the eight largest logits after it and 64 greedy tokens (ends of sequence
are tokens like any other), with the smallest distance between the two best logits on the way.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.tokenizer.load import load_tokenizer
from models.checkpoint.registry import fetch

MODELS = ("smollm2-135m", "gemma3-270m")
NUM_TOKENS = 64
TOP = 8
LONG_PROMPT_TOKENS = 700

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "中国的首都是",
    "I love 🍕 and 🐈‍⬛! My favourite emoji are",
    "a",
    "\n",
    "Once upon a time, in a village between two rivers, there lived a clockmaker who",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics", ',
    "Question: A train leaves at 9:40 and arrives at 12:15. How long is the journey?\nAnswer:",
)


def long_text() -> str:
    return "".join(
        f"On day {day} the keeper of the lighthouse counted {day * 7 % 31} ships and wrote the "
        f"number {day * day} into the book. "
        for day in range(1, 60)
    )


def load_reference(path: Path) -> torch.nn.Module:
    """transformers' model with the file's weights, float32."""
    config = transformers.AutoConfig.for_model(**load_gguf_checkpoint(str(path))["config"])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    result = model.load_state_dict(tensors, strict=False)
    # The unembedding is the embedding, tied when the model was built.
    assert result.missing_keys == ["lm_head.weight"], result
    assert not result.unexpected_keys, result
    return model


@torch.no_grad()
def greedy(model: torch.nn.Module, ids: list[int]) -> dict:
    cache = transformers.DynamicCache(config=model.config)
    logits_V = model(torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=1).logits[
        0, -1
    ]
    top = logits_V.topk(TOP)
    tokens, margin = [], float("inf")
    while True:
        best, second = logits_V.topk(2).values.tolist()
        margin = min(margin, best - second)
        tokens.append(int(logits_V.argmax()))
        if len(tokens) == NUM_TOKENS:
            break
        logits_V = model(torch.tensor([tokens[-1:]]), cache=cache, use_cache=True).logits[0, -1]
    return {
        "ids": ids,
        "top_ids": top.indices.tolist(),
        "top_logits": [round(x, 5) for x in top.values.tolist()],
        "greedy": tokens,
        "smallest_margin": round(margin, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    for name in MODELS:
        path = fetch(name)
        tokenizer, model = load_tokenizer(path), load_reference(path)
        rows = []
        for text in (*PROMPTS, long_text()):
            row = greedy(model, tokenizer.encode(text)[:LONG_PROMPT_TOKENS])
            rows.append({"text": text[:200], **row})
            shown = tokenizer.decode(row["greedy"])[:60]
            print(
                f"{name} {len(row['ids']):4} tokens, margin {row['smallest_margin']:.4f}: {shown!r}"
            )
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        (directory / f"real_{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
