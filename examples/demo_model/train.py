"""Trains the demo model from scratch: `python -m demo_model.train [--out DIR]`.

Takes well under an hour on a CPU. Seeds and the number of threads are fixed, so that a machine
reproduces its weights; another machine gets different ones of about the same accuracy.
"""

import argparse
import copy
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

from demo_model.corpus import conversations
from demo_model.evaluate import MODEL_DIR, evaluate, greedy, report
from demo_model.tokenizer import CONTEXT, TURN_START, render, train_tokenizer

SEED = 20250
THREADS = 2
STEPS = 3600
WIDTH, LINES = 320, 7  # tokens per line and lines per batch
EASY = 80_000  # conversations of one turn at the start of training
_CHUNK = 1024  # conversations packed together

Batch = tuple[Tensor, Tensor, Tensor]


def make_model(tokenizer: Any) -> Any:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
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
    defaults: Any = GenerationConfig  # its constructor has no types
    model.generation_config = defaults(
        do_sample=False,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def answer_mask(ids: list[int], opening: list[int], end: int) -> list[bool]:
    """True for the tokens that the model generates: the answers and their end tokens."""
    mask, answering = [False] * len(ids), False
    for i, token in enumerate(ids):
        mask[i] = answering
        if token == end:
            answering = False
        elif ids[max(0, i + 1 - len(opening)) : i + 1] == opening:
            answering = True
    return mask


def pack(rows: list[list[int]]) -> list[list[list[int]]]:
    """Packs whole conversations into lines of `WIDTH` tokens, the longest first."""
    lines: list[list[list[int]]] = []
    room: list[int] = []
    for row in sorted(rows, key=len, reverse=True):
        at = next((i for i, left in enumerate(room) if left >= len(row)), len(lines))
        if at == len(lines):
            lines.append([])
            room.append(WIDTH)
        lines[at].append(row)
        room[at] -= len(row)
    return lines


def batches(tokenizer: Any, seed: int) -> Iterator[Batch]:
    """Yields token ids, a mask of those to learn, and each token's conversation in its line."""
    stream, rng = conversations(seed, EASY), random.Random(seed)
    opening = tokenizer.encode(f"{TURN_START}assistant\n")
    while True:
        texts = [render(tokenizer, c) for c in itertools.islice(stream, _CHUNK)]
        lines = pack([ids for ids in tokenizer(texts)["input_ids"] if len(ids) <= WIDTH])
        rng.shuffle(lines)
        for start in range(0, len(lines) - LINES + 1, LINES):
            ids = torch.full((LINES, WIDTH), tokenizer.pad_token_id)
            mask = torch.zeros((LINES, WIDTH), dtype=torch.bool)
            owner = torch.full((LINES, WIDTH), -1)
            for i, line in enumerate(lines[start : start + LINES]):
                at = 0
                for k, row in enumerate(line):
                    here = slice(at, at + len(row))
                    ids[i, here] = torch.tensor(row)
                    mask[i, here] = torch.tensor(answer_mask(row, opening, tokenizer.eos_token_id))
                    owner[i, here] = k
                    at += len(row)
            yield ids, mask, owner


def loss_of(model: Any, batch: Batch) -> Tensor:
    """Cross entropy of the answer tokens. Conversations attend to themselves only.

    Only the positions before an answer token pass through the vocabulary projection.
    """
    ids, mask, owner = batch
    same = owner[:, None, :, None] == owner[:, None, None, :]
    causal = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()
    hidden = model.model(
        input_ids=ids, attention_mask=same & causal, use_cache=False
    ).last_hidden_state
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
    """The learning rate's factor: a short warm-up, then linear decay to zero."""
    return min((step + 1) / 50, (steps - step) / steps)


def _save(model: Any, tokenizer: Any, out: Path) -> None:
    """Saves in bfloat16, as evaluated and served."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone


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
            _save(model, tokenizer, out)
    _save(model, tokenizer, out)
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
