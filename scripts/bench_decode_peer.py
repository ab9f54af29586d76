"""HF transformers as a peer of bench_decode.py: reads JSON requests, answers with seconds."""

import json
import sys
import time
from pathlib import Path

import torch
import transformers


def main() -> None:
    path = Path(sys.argv[1])
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    models = {
        name: transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=getattr(torch, name)
        ).eval()
        for name in ("float32", "bfloat16")
    }
    answer({"name": f"transformers {transformers.__version__}, torch {torch.__version__}"})
    for line in sys.stdin:
        request = json.loads(line)
        prompts = torch.tensor(request["prompts"])
        with torch.inference_mode():
            start = time.perf_counter()
            output = models[request["dtype"]].generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=request["new_tokens"],
                max_new_tokens=request["new_tokens"],
                pad_token_id=0,
            )
            seconds = time.perf_counter() - start
        assert output.shape[1] == prompts.shape[1] + request["new_tokens"]
        answer({"seconds": seconds})


def answer(message: dict) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
