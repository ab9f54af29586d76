"""Write the tiny random checkpoints and what transformers computes from them.

    python -m tests.parity.make_tiny tests/parity/goldens

(needs torch and transformers). Every directory holds config.json, model.safetensors and
expected.npz; `expected` names the arrays. Weights are bfloat16 values, so that the float32 model is
exactly what the file holds. Biases are far from zero, norm scales far from one, scores and logits
spread: an error in any of them is not hidden by the others.
"""

import argparse
import copy
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

VOCAB = 97
FAR = 20_000  # where the second part of the far sequence starts

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def _rope(kind: str = "default", theta: float = 10_000.0, **settings: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **settings}


def _spread(low: float, high: float, count: int) -> list[float]:
    return [round(float(x), 3) for x in np.linspace(low, high, count)]


# name -> (config class, fields on top of _SMALL)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_biased_mqa": (
        "LlamaConfig",
        {
            "hidden_size": 40,  # head width 10, from hidden size over heads
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _rope(),
        },
    ),
    "llama_llama3": (
        "LlamaConfig",
        {
            "head_dim": 24,
            "rope_parameters": _rope(
                "llama3",
                500_000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        },
    ),
    "llama_linear": ("LlamaConfig", {"rope_parameters": _rope("linear", factor=3.0)}),
    "llama_dynamic": (
        "LlamaConfig",
        {"max_position_embeddings": 16, "rope_parameters": _rope("dynamic", factor=2.0)},
    ),
    "llama_yarn": (
        "LlamaConfig",
        {
            "head_dim": 16,
            "rope_parameters": _rope("yarn", factor=40.0, original_max_position_embeddings=4096),
        },
    ),
    "mistral": (
        "MistralConfig",
        {"head_dim": 10, "sliding_window": 7, "rope_parameters": _rope(theta=1_000_000.0)},
    ),
    "smollm2": (
        "LlamaConfig",
        {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": _rope(theta=100_000.0),
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
            "tie_word_embeddings": True,
            "rope_parameters": _rope(theta=5_000_000.0),
        },
    ),
    "qwen2_window": (
        "Qwen2Config",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "rope_parameters": _rope(theta=1_000_000.0),
        },
    ),
    "qwen2_5_yarn": (
        "Qwen2Config",
        {
            "hidden_size": 40,
            "tie_word_embeddings": True,
            "rope_parameters": _rope(
                "yarn",
                1_000_000.0,
                factor=4.0,
                original_max_position_embeddings=32768,
                truncate=False,
                mscale=0.707,
                mscale_all_dim=1.0,
            ),
        },
    ),
    "qwen3": (
        "Qwen3Config",
        {"head_dim": 24, "attention_bias": True, "rope_parameters": _rope(theta=1_000_000.0)},
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 10,
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "rope_parameters": _rope(),
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_key_value_heads": 1,
            "head_dim": 24,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 30,
            "rope_parameters": {
                "full_attention": _rope("linear", 1_000_000.0, factor=8.0),
                "sliding_attention": _rope(),
            },
        },
    ),
    "phi3_longrope": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 16,
            "num_key_value_heads": 4,
            "rope_parameters": _rope(
                "longrope",
                short_factor=_spread(1.0, 1.4, 4),
                long_factor=_spread(1.0, 30.0, 4),
            ),
        },
    ),
    "phi3_partial": (
        "Phi3Config",
        {
            "hidden_size": 64,
            "intermediate_size": 40,
            "sliding_window": 7,
            "rope_parameters": _rope(partial_rotary_factor=0.75),
        },
    ),
    "olmo2": ("Olmo2Config", {"head_dim": 12, "rope_parameters": _rope(theta=500_000.0)}),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 36,
            "n_head": 3,
            "n_layer": 2,
            "n_inner": 40,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}


def build(name: str, seed: int = 0) -> torch.nn.Module:
    """The variant's model with random weights, float32 that bfloat16 holds exactly."""
    config_class, fields = VARIANTS[name]
    small = {} if config_class == "GPT2Config" else _SMALL
    config = getattr(transformers, config_class)(**{**small, **fields})
    # transformers' own eager attention is the one that knows soft-caps.
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    with torch.no_grad():
        for path, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in path or ".ln_" in path:
                centre = 1.0 if path.endswith("weight") and "Gemma" not in config_class else 0.0
                value = centre + 0.3 * noise
            elif path.endswith("bias"):
                value = 0.3 * noise
            elif "embed" in path or "wte" in path or "wpe" in path:
                value = noise / p.shape[1] ** (0.5 if "Gemma" in config_class else 0.25)
            else:
                fan_in = (
                    p.shape[0]
                    if config_class == "GPT2Config" and p.shape[0] != VOCAB
                    else p.shape[1]
                )
                value = 1.5 * noise / fan_in**0.5
            p.copy_(value.to(torch.bfloat16).float())
    return model


def sequence(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB, count)


def _logits(model, tokens, positions=None, cache=None) -> np.ndarray:
    """Float32 [tokens, vocab]; `cache` grows. The mask keeps a jump in the positions from being
    taken for the start of another sequence."""
    seen = cache.get_seq_length() if cache is not None else 0
    arguments = {} if positions is None else {"position_ids": torch.as_tensor(positions)[None]}
    with torch.no_grad():
        out = model(
            input_ids=torch.as_tensor(tokens)[None],
            attention_mask=torch.ones(1, seen + len(tokens), dtype=torch.long),
            cache=cache,
            use_cache=cache is not None,
            **arguments,
        )
    return out.logits[0].float().numpy()


def _prefill_and_decode(model, tokens, prompt_len, positions=None) -> np.ndarray:
    """Logits of every token: the prompt in one pass, the others one at a time from the cache."""
    positions = np.arange(len(tokens)) if positions is None else positions
    cache = transformers.DynamicCache(config=model.config)
    rows = [_logits(model, tokens[:prompt_len], positions[:prompt_len], cache)]
    for i in range(prompt_len, len(tokens)):
        rows.append(_logits(model, tokens[i : i + 1], positions[i : i + 1], cache))
    return np.concatenate(rows)


def expected(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """tokens           28 tokens, of which 23 are the prompt
    logits           [28, V], the prompt in one pass and 5 cached steps
    crossing_logits  [28, V], the same tokens with a prompt of 12: decoding passes the window and
                     the length where length-dependent rotary kinds change
    far_tokens       14 tokens at far_positions (0..3, 20,000..), of which 12 are the prompt
    far_logits       [14, V]
    """
    tokens, far_tokens = sequence(28), sequence(14, seed=2)
    arrays = {
        "tokens": tokens,
        "logits": _prefill_and_decode(_fresh(model), tokens, 23),
        "crossing_logits": _prefill_and_decode(_fresh(model), tokens, 12),
    }
    if hasattr(model.config, "n_positions"):  # learned positions end long before
        return arrays
    positions = np.concatenate([np.arange(4), FAR + np.arange(10)])
    return arrays | {
        "far_tokens": far_tokens,
        "far_positions": positions,
        "far_prompt_len": np.int32(12),
        "far_logits": _prefill_and_decode(_fresh(model), far_tokens, 12, positions),
    }


def _fresh(model: torch.nn.Module) -> torch.nn.Module:
    """A copy: the rotary module of the dynamic kinds remembers the longest length it saw."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    fresh = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    fresh.load_state_dict(model.state_dict())
    return fresh


def save(model: torch.nn.Module, directory: Path) -> None:
    stored = _fresh(model).to(torch.bfloat16)
    stored.config.dtype = torch.bfloat16
    stored.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    for name in VARIANTS:
        model = build(name)
        save(model, directory / name)
        arrays = expected(model)
        np.savez_compressed(directory / name / "expected.npz", **arrays)
        logits = arrays["logits"]
        print(f"{name:18} max|logit| {np.abs(logits).max():6.2f}  std {logits.std():5.2f}")


if __name__ == "__main__":
    main()
