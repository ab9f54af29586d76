"""Configs of well-known models by name, for work that needs no weights: sizing, rooflines,
ahead-of-time compilation.

Each is the part of the model's own config.json that differs from its family's defaults, and is read
by the same code as a checkpoint's. Invariant: the parameter count equals the published one.
"""

from typing import Any

from models.config import ModelConfig
from models.families import family_of_hf

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA2 = {
    "model_type": "llama",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_LLAMA3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": _LLAMA3_ROPE,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_QWEN = {
    "rope_theta": 1_000_000.0,
    "num_key_value_heads": 8,
    "bos_token_id": 151643,
}

PRESETS: dict[str, dict[str, Any]] = {
    "llama-2-7b": _LLAMA2,
    "llama-2-13b": _LLAMA2
    | {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "llama-3.1-8b": _LLAMA3 | {"intermediate_size": 14336},
    "llama-3.1-70b": _LLAMA3
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "llama-3.2-1b": _LLAMA3
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_scaling": _LLAMA3_ROPE | {"factor": 32.0},
    },
    "mistral-7b-v0.3": {
        "model_type": "mistral",
        "vocab_size": 32768,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "smollm3-3b": {
        "model_type": "smollm3",
        "max_position_embeddings": 65536,
        "rope_theta": 5_000_000.0,
    },
    "qwen2.5-7b": _QWEN
    | {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "eos_token_id": 151643,
    },
    "qwen3-0.6b": _QWEN
    | {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "eos_token_id": 151645,
    },
    "qwen3-8b": _QWEN
    | {
        "model_type": "qwen3",
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "max_position_embeddings": 40960,
        "eos_token_id": 151645,
    },
    "gemma-2-2b": {"model_type": "gemma2"},
    "gemma-2-9b": {
        "model_type": "gemma2",
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "gemma-3-270m": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
    },
    "phi-3-mini-4k": {"model_type": "phi3", "sliding_window": 2047},
    "olmo-2-7b": {
        "model_type": "olmo2",
        "vocab_size": 100352,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
        "eos_token_id": 100257,
    },
    "gpt2": {"model_type": "gpt2"},
}


def preset(name: str) -> ModelConfig:
    """The config of a model that `PRESETS` lists."""
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; known: {', '.join(PRESETS)}")
    return family_of_hf(PRESETS[name]).config_from_hf(PRESETS[name])
