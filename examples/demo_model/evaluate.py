"""Held-out accuracy of the demo model: `python -m demo_model.evaluate [DIR]`."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rayfin
from demo_model.conversation import Conversation
from demo_model.tasks import KINDS
from demo_model.tokenizer import render

Generate = Callable[[list[Conversation]], list[str]]
MODEL_DIR = Path(rayfin.__file__).parent / "deployments" / "demo" / "model"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def evaluate(
    generate: Generate,
    n_per_kind: int = 100,
    misses: list[tuple[str, str, str]] | None = None,
) -> dict[str, float]:
    """Returns the share of exact answers of each kind; `misses` collects (question, wanted, got).

    `generate` must decode greedily; how it batches the prompts does not matter.
    """
    rates: dict[str, float] = {}
    for name, kind in KINDS.items():
        prompts = kind.held_out(n_per_kind)
        if not prompts:
            continue
        answers = generate([(prompt.messages, prompt.tools) for prompt in prompts])
        right = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            right += answer == prompt.expected
            if answer != prompt.expected and misses is not None:
                misses.append((prompt.messages[-1]["content"], prompt.expected, answer))
        rates[name] = right / len(prompts)
    return rates


def greedy(model: Any, tokenizer: Any, batch_size: int = 50, max_new_tokens: int = 128) -> Generate:
    """Greedy search of transformers with prompts padded on the left."""

    def generate(conversations: list[Conversation]) -> list[str]:
        texts = [render(tokenizer, c, to_answer=True) for c in conversations]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        answers = [""] * len(texts)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = tokenizer([texts[i] for i in chosen], return_tensors="pt", padding=True)
            with torch.inference_mode():
                output = model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                )
            new = output[:, batch["input_ids"].shape[1] :]
            decoded = tokenizer.batch_decode(new, skip_special_tokens=True)
            for i, text in zip(chosen, decoded, strict=True):
                answers[i] = text
        return answers

    return generate


def load(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def report(folder: Path, n_per_kind: int, show_misses: int = 0) -> None:
    """Prints the accuracy of the saved weights in every dtype for serving."""
    for name, dtype in DTYPES.items():
        misses: list[tuple[str, str, str]] = []
        rates = evaluate(greedy(*load(folder, dtype)), n_per_kind, misses)
        print(name, " ".join(f"{kind}={rate:.1%}" for kind, rate in rates.items()), flush=True)
        for question, wanted, got in misses[:show_misses]:
            print(f"  {question!r}: wanted {wanted!r}, got {got!r}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Exact answers to held-out prompts, by kind.")
    parser.add_argument("folder", nargs="?", type=Path, default=MODEL_DIR)
    parser.add_argument("-n", type=int, default=400, help="prompts of each kind (default 400)")
    parser.add_argument("--misses", type=int, default=0, help="wrong answers to print")
    options = parser.parse_args(argv)
    report(options.folder, options.n, options.misses)


if __name__ == "__main__":
    main()
