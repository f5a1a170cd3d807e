"""Models of special kinds beside transformers: decoders with states, and experts in 4 bits.

    python benchmarks/models.py hybrid [--rows 1,16] [--peer-dtype bfloat16]
    python benchmarks/models.py mxfp4 --layers 2 --rows 1,16

hybrid: a decoder whose layers keep states, beside transformers' generate in the same process. Rows
decode greedily from random prompts; then a prompt is computed cold, and the turn that follows it.
Weights are random numbers that bfloat16 can represent.
mxfp4: gpt-oss' experts in 4 bits, beside the same model with plain weights and beside transformers:
gpt-oss-20b's sizes but for its layers and vocabulary, of random codes. Each is in a process of its
own; memory is what the process cannot give back, of weights and pages.
The least of several runs is printed.
"""

import argparse
import gc
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sections import run
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
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

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
            written = {"prompt_token_ids": prompt}
            output = llm.generate([written], params, use_tqdm=False)[0].outputs[0]
            seconds.append(time.perf_counter() - started)
            prompt = [*prompt, *output.token_ids, *(numbers.randrange(3, 40000) for _ in range(16))]
    return min(cold), min(second)


def hybrid() -> None:
    parser = argparse.ArgumentParser()
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


SUBJECTS = ("4 bits", "plain", "transformers")


def save_mxfp4(folder: Path, config: Any) -> None:
    """A checkpoint of random numbers: experts in blocks of 4-bit floats, the rest in bfloat16."""
    make: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = make.from_config(config, dtype=torch.bfloat16)
    tensors: dict[str, torch.Tensor] = {}
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = parameter.shape
            groups = (experts, outputs, inputs // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(117, 122, groups, dtype=torch.uint8)
        elif parameter.dim() > 1:
            tensors[name] = (torch.randn(parameter.shape) * 0.02).bfloat16()
        else:
            tensors[name] = torch.full(parameter.shape, float("norm" in name), dtype=torch.bfloat16)
    folder.mkdir(exist_ok=True)
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def config_of(layers: int) -> Any:
    architecture, sizes = SHAPES["gpt-oss"]
    kinds = (["sliding_attention", "full_attention"] * layers)[:layers]
    sizes = {**sizes, "num_hidden_layers": layers, "layer_types": kinds}
    return AutoConfig.for_model(architecture, bos_token_id=1, eos_token_id=2, **sizes)


def prompts_of(rows: int) -> list[list[int]]:
    numbers = random.Random(rows)
    return [[numbers.randrange(3, 10000) for _ in range(8)] for _ in range(rows)]


def measure(subject: str, folder: str, sizes: list[int], tokens: int, rounds: int) -> list[float]:
    """New tokens a second for each number of rows, prompts included; MiB of memory."""
    before = anonymous()
    run = _transformers(folder) if subject == "transformers" else _rayfin(folder, subject, sizes)
    gc.collect()
    memory = anonymous() - before
    speeds = []
    for rows in sizes:
        work = partial(run, prompts_of(rows), tokens)
        speeds.append(rows * tokens / least(work, rounds))
    return [*speeds, memory]


def _rayfin(folder: str, subject: str, sizes: list[int]) -> Any:
    from rayfin import LLM, SamplingParams

    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        quantization="dequantize" if subject == "plain" else None,
        max_decoding_batch=max(sizes),
        max_model_len=256,
        kv_cache_memory=1 << 26,
    )

    def run(prompts: list[list[int]], tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        llm.reset_prefix_cache()
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    return run


def _transformers(folder: str) -> Any:
    from rayfin.actors.config import EngineArgs
    from rayfin.actors.runner.models.config import load_config
    from rayfin.actors.runner.models.weights import load_model

    # transformers itself reads MXFP4 with other packages only.
    args = EngineArgs(model=folder, device="cpu", quantization="dequantize")
    model: Any = load_model(args, load_config(args), torch.device("cpu"), "eager")

    @torch.inference_mode()
    def run(prompts: list[list[int]], tokens: int) -> None:
        ids = {"pad_token_id": 0, "eos_token_id": None, "do_sample": False}
        inputs = torch.tensor(prompts)
        mask = torch.ones_like(inputs)
        model.generate(inputs, attention_mask=mask, max_new_tokens=tokens, **ids)

    return run


def anonymous() -> float:
    """MiB that this process cannot give back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


def mxfp4() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", default="1,16", help="numbers of requests")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens of each")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=SUBJECTS, choices=SUBJECTS)
    args = parser.parse_args()
    sizes = [int(rows) for rows in args.rows.split(",")]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        save_mxfp4(Path(folder), config_of(args.layers))
        names = [f"{rows} rows, tokens/s" for rows in sizes]
        print(f"| experts | {' | '.join(names)} | memory, MiB |\n|---|{'---|' * (len(sizes) + 1)}")
        for subject in args.only:
            with context.Pool(1) as pool:
                *speeds, memory = pool.apply(
                    measure, (subject, folder, sizes, args.tokens, args.rounds)
                )
            cells = " | ".join(f"{speed:.1f}" for speed in speeds)
            print(f"| {subject} | {cells} | {memory:.0f} |", flush=True)


if __name__ == "__main__":
    run(__doc__, hybrid, mxfp4)
