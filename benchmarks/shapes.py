"""Models of real sizes for benchmarks: architecture and sizes, without weights."""

from typing import Any

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "135m": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    ),
    "0.6b": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "mixture": (  # 32 experts, 4 of them for a token
        "qwen3_moe",
        {
            "vocab_size": 49152,
            "hidden_size": 1024,
            "intermediate_size": 1536,
            "moe_intermediate_size": 512,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
    ),
    "hybrid": (  # three of four layers keep a state: gated delta rule
        "qwen3_5_text",
        {
            "vocab_size": 49152,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
        },
    ),
    "gpt-oss": (  # gpt-oss-20b with fewer layers and a small vocabulary
        "gpt_oss",
        {
            "vocab_size": 16384,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 2,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "max_position_embeddings": 4096,
        },
    ),
    "8b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
}
