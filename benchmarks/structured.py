"""The cost of structured output: guided rows beside free ones, and beside another engine's.

    python benchmarks/structured.py [--rounds 3] [--rows 32]
    python benchmarks/structured.py --peer /opt/vllm/bin/python     # vLLM in its own environment

The model has the 135M shape, random weights, and a byte-level vocabulary of 49,152 tokens. Every
engine runs in a process that starts anew with the Python of its environment, in turns.

free, guided: the same rows to the same lengths, without and with a grammar.
schemas: 64 different JSON schemas, 32 at once, arrays without an end, so that all engines write
the same number of tokens. valid answers: the same schemas, each answer to its end, without blanks:
with random weights any blank that is allowed may go on to the limit. Answers count that are valid.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 49_152
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 96
SCHEMAS = 64
AT_ONCE = 32
MAX_TOKENS = 256  # of an answer to a schema
ENDLESS = {"type": "array", "minItems": 10_000, "items": {"type": "integer", "minimum": 0}}
WORDS = ("name", "city", "count", "state", "price", "label", "owner", "level", "score", "note")


def make_model(folder: Path) -> None:
    """Saves the model and its tokenizer."""
    import torch
    from shapes import SHAPES
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    architecture, sizes = SHAPES["135m"]
    config = AutoConfig.for_model(
        architecture,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        **sizes,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_tokenizer() -> Any:
    """A byte-level vocabulary: trained on this repository's text, then pairs of its tokens."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    root = Path(__file__).parents[1]
    files = [
        str(path) for path in sorted(root.rglob("*.md")) + sorted(root.rglob("actors/**/*.py"))
    ]
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train(
        files,
        tokenizers.trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<|end|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    state = json.loads(trained.to_str())["model"]
    vocabulary: dict[str, int] = state["vocab"]
    merges = [tuple(pair) for pair in state["merges"]]
    rng, listed = random.Random(0), [token for token in vocabulary if token != "<|end|>"]
    while len(vocabulary) < VOCABULARY:
        left, right = rng.choice(listed), rng.choice(listed)
        if left + right not in vocabulary and len(left + right) <= 16:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
    whole = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = tokenizers.decoders.ByteLevel()
    whole.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<|end|>")


def schemas(count: int = SCHEMAS, seed: int = 0) -> list[dict[str, Any]]:
    """Different schemas, whose answers end: strings, numbers and arrays are bounded."""
    rng = random.Random(seed)
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "string", "maxLength": rng.randint(4, 24)},
        lambda: {"type": "integer", "minimum": 0, "maximum": rng.randint(10, 10_000)},
        lambda: {"type": "boolean"},
        lambda: {"enum": rng.sample(WORDS, 4)},
        lambda: {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        lambda: {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 1,
            "maxItems": rng.randint(2, 6),
        },
    ]

    def an_object(depth: int) -> dict[str, Any]:
        names = rng.sample(WORDS, rng.randint(3, 6))
        fields = {name: rng.choice(kinds)() for name in names}
        if depth:
            fields["inner"] = an_object(depth - 1)
        return {
            "type": "object",
            "properties": fields,
            "required": list(fields),
            "additionalProperties": False,
        }

    return [an_object(place % 3) for place in range(count)]


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300, 9000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def rayfin_engine(folder: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(generate, parameters) of this engine."""
    from rayfin import LLM, SamplingParams, StructuredOutputs

    llm = LLM(
        folder,
        threads=os.cpu_count(),
        max_model_len=4096,
        max_decoding_batch=AT_ONCE,
        spec_method="none",
    )

    def params(schema: dict[str, Any] | None, tokens: int, endless: bool) -> Any:
        form = None
        if schema is not None:
            form = StructuredOutputs(json=schema, disable_any_whitespace=True)
        return SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=endless, structured_outputs=form
        )

    return lambda ids, settings: llm.generate(ids, settings, use_tqdm=False), params


def vllm_engine(folder: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(generate, parameters) of vLLM."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(folder, dtype="float32", max_model_len=4096, max_num_seqs=AT_ONCE)

    def params(schema: dict[str, Any] | None, tokens: int, endless: bool) -> Any:
        form = None
        if schema is not None:
            form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
        return SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=endless, structured_outputs=form
        )

    def generate(ids: Sequence[list[int]], settings: Any) -> Any:
        return llm.generate(
            [{"prompt_token_ids": prompt} for prompt in ids], settings, use_tqdm=False
        )

    return generate, params


def measure(engine: str, folder: str, rows: int) -> dict[str, float]:
    """Output tokens per second of each workload, after a warm-up of its own."""
    generate, params = {"rayfin": rayfin_engine, "vllm": vllm_engine}[engine](folder)
    result: dict[str, float] = {}
    for place, (name, schema) in enumerate((("free", None), ("guided", ENDLESS)) * 2):
        settings = [params(schema, OUTPUT_TOKENS if place > 1 else 4, True)] * rows
        started = time.perf_counter()
        outputs = generate(prompts(rows, seed=place), settings)
        seconds = time.perf_counter() - started
        result[name] = sum(len(output.outputs[0].token_ids) for output in outputs) / seconds
    forms = schemas()
    # For tokens/s arrays of such objects without an end, so that the engines write the same number.
    settings = [
        params({"type": "array", "minItems": 10_000, "items": schema}, OUTPUT_TOKENS, True)
        for schema in forms
    ]
    started = time.perf_counter()
    outputs = generate(prompts(len(forms), seed=8), settings)
    seconds = time.perf_counter() - started
    result["schemas"] = sum(len(output.outputs[0].token_ids) for output in outputs) / seconds
    settings = [params(schema, MAX_TOKENS, False) for schema in forms]
    started = time.perf_counter()
    outputs = generate(prompts(len(forms), seed=9), settings)
    seconds = time.perf_counter() - started
    answers = [output.outputs[0] for output in outputs]
    ended = [answer.finish_reason == "stop" for answer in answers]
    result["ended"] = sum(ended) / len(ended)
    valid = sum(
        is_valid(answer.text, schema)
        for answer, schema, whole in zip(answers, forms, ended, strict=True)
        if whole
    )
    result["valid"] = valid / max(sum(ended), 1)
    result["answers"] = valid / seconds
    return result


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peer", help="Python of an environment with vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=AT_ONCE)
    parser.add_argument("--child", nargs=2, metavar=("ENGINE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print("RESULT " + json.dumps(measure(*options.child, options.rows)))
        return
    engines = {"rayfin": sys.executable} | ({"vllm": options.peer} if options.peer else {})
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for _ in range(options.rounds):
            for name, python in engines.items():
                runs[name].append(in_child(name, python, folder, options.rows))
    report(runs)


def in_child(name: str, python: str, folder: str, rows: int) -> dict[str, float]:
    command = [python, __file__, "--rows", str(rows), "--child", name, folder]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, float] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def report(runs: dict[str, list[dict[str, float]]]) -> None:
    """Prints medians over the rounds, and the ratios."""
    print(
        "| engine | free, tokens/s | guided | guided / free | schemas | valid answers/s | ended | "
        "of these valid |"
    )
    print("|---|---|---|---|---|---|---|---|")
    middle = {
        name: {key: statistics.median(run[key] for run in rounds) for key in rounds[0]}
        for name, rounds in runs.items()
    }
    for name, figures in middle.items():
        ratio = statistics.median(run["guided"] / run["free"] for run in runs[name])
        print(
            f"| {name} | {figures['free']:.1f} | {figures['guided']:.1f} | {ratio:.3f} | "
            f"{figures['schemas']:.1f} | {figures['answers']:.2f} | {figures['ended']:.0%} | "
            f"{figures['valid']:.0%} |"
        )
    if "vllm" in middle:
        for key, what in (("schemas", "tokens/s"), ("answers", "valid answers/s")):
            theirs = middle["vllm"][key]
            ratio = f"{middle['rayfin'][key] / theirs:.2f}" if theirs else "vLLM gives none"
            print(f"\nschemas, Rayfin / vLLM, {what}: {ratio}")


if __name__ == "__main__":
    main()
