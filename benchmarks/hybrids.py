"""A decoder whose layers keep states, beside transformers' generate in the same process.

python benchmarks/hybrids.py [--rows 1,16] [--peer-dtype bfloat16]

Rows decode greedily from random prompts; then a prompt is computed cold, and the turn that follows
it. Weights are random numbers that bfloat16 can represent. The least of several runs is printed.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from shapes import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM

from rayfin import LLM, SamplingParams

SHAPE = "hybrid"
THREADS = torch.get_num_threads()


def save_model(folder: str) -> int:
    """Saves random weights; their number."""
    architecture, sizes = SHAPES[SHAPE]
    config = AutoConfig.for_model(architecture, bos_token_id=1, eos_token_id=2, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def least(run: Callable[[], Any], rounds: int) -> float:
    """Seconds of the fastest of ``rounds`` runs."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def throughput(
    llm: LLM, peer: Any, rows: int, prompt: int, tokens: int, rounds: int
) -> tuple[float, float]:
    """New tokens a second of both, prompts included."""
    numbers = random.Random(rows)
    prompts = [[numbers.randrange(3, 40000) for _ in range(prompt)] for _ in range(rows)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    inputs = torch.tensor(prompts)
    ids = {"pad_token_id": 0, "eos_token_id": None, "do_sample": False}

    own_threads = torch.get_num_threads()  # the model may be better off with one

    def ours() -> None:
        torch.set_num_threads(own_threads)
        llm.reset_prefix_cache()
        llm.generate([{"prompt_token_ids": own} for own in prompts], params, use_tqdm=False)

    @torch.inference_mode()
    def theirs() -> None:
        torch.set_num_threads(THREADS)
        mask = torch.ones_like(inputs)
        peer.generate(inputs, attention_mask=mask, max_new_tokens=tokens, **ids)

    total = rows * tokens
    peers = total / least(theirs, rounds)
    return total / least(ours, rounds), peers  # threads are ours again


def turns(llm: LLM, length: int, rounds: int) -> tuple[float, float]:
    """Seconds to the first token of a prompt, and of the turn that follows it."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    cold, second = [], []
    for turn in range(rounds):
        numbers = random.Random(turn)
        prompt = [numbers.randrange(3, 40000) for _ in range(length)]
        for seconds in (cold, second):
            started = time.perf_counter()
            own = {"prompt_token_ids": prompt}
            output = llm.generate([own], params, use_tqdm=False)[0].outputs[0]
            seconds.append(time.perf_counter() - started)
            prompt = [*prompt, *output.token_ids, *(numbers.randrange(3, 40000) for _ in range(16))]
    return min(cold), min(second)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="1,16", help="numbers of requests")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of their prompts")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each")
    parser.add_argument("--turn", type=int, default=1000, help="tokens of the first turn")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peer-dtype", default="float32", help="of transformers' model")
    args = parser.parse_args()
    sizes = [int(rows) for rows in args.rows.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        parameters = save_model(folder)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            max_decoding_batch=max(sizes),
            max_model_len=args.turn + 256,
            kv_cache_memory=1 << 28,
        )
        dtype = getattr(torch, args.peer_dtype)
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        print(f"{parameters / 1e6:.0f} million parameters; transformers in {args.peer_dtype}")
        print("| rows | Rayfin, tokens/s | transformers | ratio |\n|---|---|---|---|")
        for rows in sizes:
            ours, theirs = throughput(llm, peer, rows, args.prompt, args.tokens, args.rounds)
            print(f"| {rows} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |", flush=True)
        cold, second = turns(llm, args.turn, args.rounds)
    print(f"prompt of {args.turn} tokens: {cold * 1e3:.0f} ms to the first token, ", end="")
    print(f"{second * 1e3:.0f} ms in the second turn: {second / cold:.3f}")


if __name__ == "__main__":
    main()
