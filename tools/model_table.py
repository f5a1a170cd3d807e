"""Tries every causal family of transformers, built tiny, and writes docs/models.md.

    python tools/model_table.py             # prints a line for each family
    python tools/model_table.py gptj bloom  # some of them
    python tools/model_table.py --write     # all, and writes the tables into docs/models.md

A family is served if greedy tokens of three prompts, in one batch and in chunks, are those of
transformers' own ``generate``.
"""

import argparse
import logging
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, __version__
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from rayfin import LLM, SamplingParams
from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.media.kinds import SPEECH_MODELS

DOCS = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- made by tools/model_table.py -->\n", "<!-- end -->\n"
FAMILIES = tuple(
    family for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if family not in SPEECH_MODELS
)
LAYERS, VOCABULARY, MAX_TOKENS, SECONDS = 4, 128, 8, 240  # LAYERS is also a number of heads
MAX_PARAMETERS = 20_000_000
PROMPTS = (5, 19, 40)  # tokens: below and above the windows, and in several chunks

SIZES: dict[int, tuple[str, ...]] = {
    2: (
        *("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "num_experts_per_tok"),
        *("num_experts_per_token", "moe_k", "moe_topk", "top_k_experts", "depth"),
        *("linear_num_key_heads", "decoder_layers", "encoder_layers"),
    ),
    LAYERS: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
        *("decoder_attention_heads", "encoder_attention_heads", "linear_num_value_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        *("mamba_dt_rank", "time_step_rank", "mm_tokens_per_image"),
    ),
    8: (
        *("head_dim", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        *("rotary_dim", "sliding_window", "attention_window_size", "attention_chunk_size"),
        *("window_size", "linear_key_head_dim", "linear_value_head_dim", "mamba_n_heads"),
        *("mamba_d_head", "mamba_d_state", "mamba_num_heads", "mamba_head_dim", "state_size"),
        *("ssm_state_size", "index_topk", "index_head_dim", "hidden_size_per_layer_input"),
        *("patch_size",),
    ),
    # Of few heads some scores are all zero, and of equal ones torch chooses any.
    16: (
        "index_n_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "mamba_chunk_size",
        "chunk_size",
    ),
    24: ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"),
    32: (
        *("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "hidden_dim"),
        *("word_embed_proj_dim", "lru_width", "projection_dim", "out_hidden_size"),
    ),
    48: (
        *("intermediate_size", "ffn_dim", "n_inner", "d_ff", "inner_dim", "ffn_hidden_size"),
        *("decoder_ffn_dim", "encoder_ffn_dim", "dim_ff"),
    ),
    64: ("mamba_d_ssm",),
    256: (
        *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
        "max_sequence_length",
    ),
    1: (
        *("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "n_groups"),
        *("first_k_dense_replace", "mamba_n_groups"),
    ),
}
SIZE = {name: size for size, names in SIZES.items() for name in names}
NEEDED = (
    *("head_dim", "num_key_value_heads", "n_routed_experts", "n_group", "topk_group"),
    *("n_shared_experts", "num_experts_per_tok"),
)
"""Sizes that some families leave at None and need."""

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TYPES = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")

_MIXED = ["mamba", "attention"] * (LAYERS // 2)
SPECIAL: dict[str, dict[str, Any]] = {
    "apertus1p5_text": {"output_vocab_size": VOCABULARY - 8},
    "bailing_hybrid": {"num_group": 1, "num_expert_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * LAYERS,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 8, "indexer_compress_ratio": 4},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dory": {
        **{"num_hidden_layers": LAYERS, "n_input_layers": 1, "n_recurrent_layers": 2},
        **{"n_output_layers": 1, "layer_types": ["sliding_attention", "full_attention"] * 2},
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": {"layer_types": _MIXED},
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY},
    "inkling2_loop_text": {
        "loop_layer_index_start": 2,
        "loop_layer_index_end": LAYERS,
        "n_layers_per_attn_res_block": 2,
        "unpadded_vocab_size": VOCABULARY,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "mamba2": {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "expand": 2},
}
"""What a family needs beyond sizes."""

ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Families of encoders, which are tried as decoders."""

DECODERS_OF_PAIRS = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp"),
    *("musicgen", "musicgen_melody", "pegasus", "plbart", "prophetnet", "trocr"),
    *("git", "mllama", "emu3", "moss_transcribe_diarize", "xlm", "xlnet"),
)
"""Families whose causal class is a half of an encoder-decoder, needs images or sound, or attends
in both directions."""


@dataclass(frozen=True)
class Verdict:
    """What became of a family: "served", "refused", "wrong" or "not built", and why."""

    family: str
    state: str
    reason: str = ""


def shrink(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The changes that make a config's ``fields`` tiny, those of its parts included."""
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name.endswith("_config") and isinstance(value, dict) and value:
            small[name] = shrink(value)
            if "model_type" in value:
                small[name]["model_type"] = value["model_type"]
        elif name == "vocab_size":
            small[name] = VOCABULARY
        elif name in SIZE and type(value) is int:
            small[name] = min(SIZE[name], value)
        elif name in NEEDED and value is None:
            small[name] = SIZE[name]
        elif name in TOKENS and value is not None:
            small[name] = TOKENS[name]
        elif name in TYPES and isinstance(value, list):
            small[name] = (list(dict.fromkeys(value)) * LAYERS)[:LAYERS]
    if "initializer_range" in fields:
        small["initializer_range"] = 0.2
    if "kv_lora_rank" in fields:  # latent attention has keys for each head
        small["num_key_value_heads"] = 4
    return small


def tiny_config(family: str) -> PretrainedConfig:
    kind: Any = CONFIG_MAPPING[family]
    special = {"is_decoder": True} if family in ENCODERS else SPECIAL.get(family, {})
    config: PretrainedConfig = kind(**{**shrink(kind().to_dict()), **special})
    return config


def build(family: str) -> Any:
    """A tiny random PreTrainedModel; raises what transformers raises."""
    torch.manual_seed(0)
    config, make = tiny_config(family), cast(Any, AutoModelForCausalLM)
    with torch.device("meta"):
        size = make.from_config(config).num_parameters()
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size:,} parameters are too many")
    model = make.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            state = name.endswith(("A_log", "dt_bias", ".D"))
            if parameter.dim() < 2 and "norm" not in name and not state:
                parameter.normal_(0.0, 0.2)  # zeros would hide a bias that is left out
    model.generation_config = cast(Any, GenerationConfig)()
    return model.eval()


def serve(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy tokens that Rayfin gives for ``prompts``."""
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        threads=1,
        kv_cache_memory=10**8,
        max_model_len=128,
        page_size=4,
        max_batch_tokens=24,
    )
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, greedy, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def generate(model: Any, prompt: list[int]) -> list[int]:
    """The greedy tokens that transformers gives."""
    settings = cast(Any, GenerationConfig)(
        max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
    )
    tokens = torch.tensor([prompt])
    output = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), generation_config=settings
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def judge(family: str) -> Verdict:
    """Builds the family tiny, and compares its tokens with transformers'."""
    try:
        model = build(family)
    except Exception as error:  # whatever a model's own code raises
        return Verdict(family, "not built", " ".join(str(error).split())[:160])
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    prompts = [
        [(7 * index + 13 * length + 5) % (vocabulary - 20) + 10 for index in range(length)]
        for length in PROMPTS
    ]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            tokens = serve(folder, prompts)
        except (UnsupportedModel, InvalidConfig) as error:
            text = str(error).replace(folder, "it").partition("cannot be served: ")
            return Verdict(family, "refused", (text[2] or text[0]).split("\n")[0])
    expected = [generate(model, prompt) for prompt in prompts]
    if tokens != expected:
        return Verdict(family, "wrong", f"tokens {tokens}, transformers' {expected}")
    return Verdict(family, "served")


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"no answer in {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def judge_all(families: Iterable[str]) -> Iterator[Verdict]:
    for family in families:
        try:
            with time_limit(SECONDS):
                yield judge(family)
        except TimeoutError as error:
            yield Verdict(family, "not built", str(error))


def tables(verdicts: list[Verdict]) -> str:
    """The part of docs/models.md that says what became of each family."""
    served = [verdict.family for verdict in verdicts if verdict.state == "served"]
    refused = [verdict for verdict in verdicts if verdict.state not in ("served", "not built")]
    unbuilt = [verdict for verdict in verdicts if verdict.state == "not built"]
    others = (*ENCODERS, *DECODERS_OF_PAIRS)
    families = f"{len(verdicts)} causal families of transformers {__version__}"
    lines = [f"Of {families}, {len(served)} are served."]
    lines += ["", f"### Served: {len(served)}", "", " ".join(f"`{name}`" for name in served)]
    parts = [
        ("Refused decoders", "Why", [row for row in refused if row.family not in others]),
        (
            "Refused parts of encoder-decoders, and encoders as decoders",
            "Why",
            [row for row in refused if row.family in others],
        ),
        ("Not tried, as they were not built tiny", "What transformers says", unbuilt),
    ]
    for title, column, rows in parts:
        lines += ["", f"### {title}: {len(rows)}", "", f"| Family | {column} |", "|---|---|"]
        lines += [f"| `{row.family}` | {row.reason.replace('|', '/')} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Try every causal family of transformers.")
    parser.add_argument("families", nargs="*", default=FAMILIES, help="default: all")
    parser.add_argument("--write", action="store_true", help="write docs/models.md")
    options = parser.parse_args()
    if options.write and tuple(options.families) != FAMILIES:
        parser.error("--write takes all families")
    warnings.filterwarnings("ignore")
    quieter: Any = transformers_logging
    quieter.disable_progress_bar()
    quieter.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    verdicts = []
    for verdict in judge_all(options.families):
        print(verdict.family, verdict.state, verdict.reason, sep="\t", flush=True)
        verdicts.append(verdict)
    if options.write:
        text = DOCS.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        DOCS.write_text(before + BEGIN + tables(verdicts) + END + after, encoding="utf-8")
    return int(any(verdict.state == "wrong" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
