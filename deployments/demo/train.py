"""Makes the demo model from nothing: `python -m rayfin.deployments.demo.train [--out DIR]`.

Runs on a CPU in well under an hour. The seeds and the thread count are fixed, so a machine that
runs it twice gets the same weights twice; another machine gets others, much as good.
"""

import argparse
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from rayfin.deployments.demo.corpus import conversations
from rayfin.deployments.demo.evaluate import MODEL_DIR, evaluate, greedy, report
from rayfin.deployments.demo.tokenizer import CONTEXT, TURN_START, render, train_tokenizer

SEED = 20250
THREADS = 2
STEPS = 4500
BATCH_TOKENS = 3072
LONGEST = 512
_CHUNK = 2048  # conversations sorted by length together, so that batches need little padding

Batch = tuple[Tensor, Tensor]


def make_model(tokenizer: Any) -> Any:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    defaults: Any = GenerationConfig  # transformers leaves its constructor without types
    model.generation_config = defaults(
        do_sample=False,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def answer_mask(ids: list[int], opening: list[int], end: int) -> list[bool]:
    """True on the tokens that the model itself would write: the answers and the ends of them."""
    mask, answering = [False] * len(ids), False
    for i, token in enumerate(ids):
        mask[i] = answering
        if token == end:
            answering = False
        elif ids[max(0, i + 1 - len(opening)) : i + 1] == opening:
            answering = True
    return mask


def batches(tokenizer: Any, seed: int) -> Iterator[Batch]:
    """Token ids, and a mask of those to learn; conversations of like length share a batch."""
    stream, rng = conversations(seed), random.Random(seed)
    opening = tokenizer.encode(f"{TURN_START}assistant\n")
    while True:
        texts = [render(tokenizer, c) for c in itertools.islice(stream, _CHUNK)]
        rows = [ids for ids in tokenizer(texts)["input_ids"] if len(ids) <= LONGEST]
        rows.sort(key=len)
        groups: list[list[list[int]]] = [[]]
        for row in rows:
            if len(row) * (len(groups[-1]) + 1) > BATCH_TOKENS:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            width = max(map(len, group))
            ids = torch.full((len(group), width), tokenizer.pad_token_id)
            mask = torch.zeros((len(group), width), dtype=torch.bool)
            for i, row in enumerate(group):
                ids[i, : len(row)] = torch.tensor(row)
                mask[i, : len(row)] = torch.tensor(
                    answer_mask(row, opening, tokenizer.eos_token_id)
                )
            yield ids, mask


def loss_of(model: Any, batch: Batch) -> Tensor:
    """Padding stands on the right, where causal attention hides it, so no attention mask is needed.

    Only the positions before an answer token pass through the vocabulary projection.
    """
    ids, mask = batch
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    learned = mask[:, 1:]
    logits = model.lm_head(hidden[:, :-1][learned])
    return functional.cross_entropy(logits, ids[:, 1:][learned])


def make_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.02),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate(step: int, steps: int) -> float:
    """Warm up, hold for a third of the run, then fall to nothing in a straight line."""
    warm, hold = steps // 40 + 1, steps // 3
    return min((step + 1) / warm, 1.0, (steps - step) / (steps - hold))


def train(out: Path, steps: int = STEPS, seed: int = SEED, probe_every: int = 500) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(THREADS)
    begun = time.monotonic()
    tokenizer = train_tokenizer(seed)
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    optimizers = make_optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate(step, steps)) for o in optimizers
    ]
    recent = 0.0
    for step, batch in enumerate(itertools.islice(batches(tokenizer, seed), steps), start=1):
        model.train()
        loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        recent += loss.item()
        if step % 100 == 0:
            print(f"{step} loss {recent / 100:.4f} {time.monotonic() - begun:.0f} s", flush=True)
            recent = 0.0
        if step % probe_every == 0 and step < steps:
            rates = evaluate(greedy(model.eval(), tokenizer), 25)
            print("  ", " ".join(f"{k}={v:.0%}" for k, v in rates.items()), flush=True)
    model.to(torch.bfloat16).save_pretrained(out)  # what is served is what gets rounded and judged
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    print(f"saved to {out} after {time.monotonic() - begun:.0f} s", flush=True)
    report(out, 400, show_misses=40)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the built-in demo model.")
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(argv)
    train(options.out, options.steps, options.seed)


if __name__ == "__main__":
    main()
