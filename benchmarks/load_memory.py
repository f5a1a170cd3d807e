"""The memory that a load takes on a CPU: at its peak, beside what stays.

    python benchmarks/load_memory.py
    python benchmarks/load_memory.py --stored float16 --experts 8
    python benchmarks/load_memory.py --settings '{"quantization": "int4"}'
    python benchmarks/load_memory.py --checkpoint gptq
    python benchmarks/load_memory.py --checkpoint gptq --experts 8
    python benchmarks/load_memory.py --checkpoint mxfp4 --experts 8
    python benchmarks/load_memory.py --checkpoint gguf
    python benchmarks/load_memory.py --checkpoint gptq --ranks 2
    python benchmarks/load_memory.py --encoder
    python benchmarks/load_memory.py --images

A Llama (Mixtral with experts, gpt-oss in MXFP4, BERT with --encoder, LLaVA with --images) of random
weights, with layers that are all alike, is loaded in a process of its own, as an engine loads it.
With --ranks several processes load a share each, and that of the first one is measured.
Anonymous memory is what the process cannot give back; pages of the mapped checkpoint are the
system's cache, which it takes back whenever it needs them.
"""

import argparse
import gc
import json
import multiprocessing
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

from quantized import is_layer, quantise

INTERVAL = 0.002
"""Seconds between two looks at the memory."""

HOST = "127.0.0.1"

KINDS = {"anonymous": ("RssAnon",), "all": ("RssAnon", "RssFile", "RssShmem")}
CHECKPOINTS = ("plain", "gptq", "fp8", "mxfp4", "gguf")
Memory = dict[str, float]
"""MiB by kind."""

T = TypeVar("T")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--experts", type=int, default=0, help="of each layer, of half its width")
    parser.add_argument("--stored", default="bfloat16", help="dtype of the checkpoint")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="plain")
    parser.add_argument("--encoder", action="store_true", help="a BERT")
    parser.add_argument("--images", action="store_true", help="a LLaVA: as many layers twice")
    parser.add_argument("--ranks", type=int, default=1, help="tensor_parallel_size")
    parser.add_argument("--settings", type=json.loads, default={}, help="EngineArgs, as JSON")
    parser.add_argument("--json", action="store_true", help="print MiB as JSON")
    parser.add_argument(
        "--lines", action="store_true", help="read the options of each load as a line of JSON"
    )
    options = parser.parse_args()
    # What a load imports is no part of what it takes, and each is in a process that is forked.
    from rayfin.actors.runner import checkpoint, model_runner  # noqa: F401

    if options.lines:
        for line in sys.stdin:
            print(json.dumps(measure(parser.parse_args(json.loads(line)))[1]), flush=True)
        return 0
    size, measured = measure(options)
    if options.json:
        print(json.dumps(measured))
        return 0
    kind = options.stored if options.checkpoint == "plain" else options.checkpoint
    print(f"a checkpoint of {size / 2**20:.0f} MiB in {kind}; MiB of memory")
    for kind in KINDS:
        before, peak, after = (measured[when][kind] for when in ("before", "peak", "after"))
        print(
            f"{kind:10} {before:6.0f} before, {peak:6.0f} at the peak, {after:6.0f} after: "
            f"{(peak - before) / (after - before):.2f} x of what stays"
        )
    return 0


def measure(options: argparse.Namespace) -> tuple[int, dict[str, Memory]]:
    """Bytes of the checkpoint; MiB before the load, at its peak and after it."""
    settings = options.settings | ({"runner": "pooling"} if options.encoder else {})
    with tempfile.TemporaryDirectory() as folder:
        apart(write_model, Path(folder), options)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        return size, apart(load_ranks, folder, settings, options.ranks)


def apart(work: Callable[..., T], *arguments: Any) -> T:
    """The result of ``work`` in a process of its own, which begins as this one is.

    Raises:
        EOFError: it has failed; its traceback is on standard error.
    """

    def run() -> None:
        with redirect_stdout(sys.stderr):
            theirs.send(work(*arguments))

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=run)
    child.start()
    theirs.close()
    try:
        result: T = ours.recv()
    finally:
        child.join()
    return result


def write_model(folder: Path, options: argparse.Namespace) -> None:
    """Random weights; heads of 64, a quarter of them for keys and values."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if options.images:
        write_images(folder, options)
        return
    if options.encoder:
        write_encoder(folder, options)
        repeat_layer(folder, options.layers)
        return
    width = 11 * options.hidden // 4
    sizes: dict[str, Any] = {
        "vocab_size": options.vocabulary,
        "hidden_size": options.hidden,
        "intermediate_size": width // 2 if options.experts else width,
        "num_hidden_layers": 1,
        "num_attention_heads": options.hidden // 64,
        "num_key_value_heads": max(1, options.hidden // 256),
        "max_position_embeddings": 2048,
    }
    if options.experts:
        sizes |= {"num_local_experts": options.experts, "num_experts_per_tok": 2}
    if options.checkpoint == "mxfp4":
        from models import save_mxfp4

        sizes |= {"head_dim": 64, "layer_types": ["full_attention"]}
        sizes |= {"num_local_experts": options.experts or 8}
        save_mxfp4(folder, AutoConfig.for_model("gpt_oss", **sizes))
        repeat_layer(folder, options.layers)
        return
    config = AutoConfig.for_model("mixtral" if options.experts else "llama", **sizes)
    make: Any = AutoModelForCausalLM
    make.from_config(config, dtype=getattr(torch, options.stored)).save_pretrained(folder)
    if options.checkpoint == "gptq":
        quantise(folder)
    elif options.checkpoint == "fp8":
        write_fp8(folder)
    repeat_layer(folder, options.layers)
    if options.checkpoint == "gguf":
        write_gguf(folder)


def repeat_layer(folder: Path, count: int) -> None:
    """Makes as many layers of the model's one: to draw the weights of each takes longer."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in list(tensors.items()):
        before, *parts = re.split(r"(?<=\.layer)(s?\.)0(?=\.)", name, maxsplit=1)
        for number in range(1, count if parts else 1):
            tensors[f"{before}{parts[0]}{number}{parts[1]}"] = tensor.clone()
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = count
    if "layer_types" in config:
        config["layer_types"] *= count
    (folder / "config.json").write_text(json.dumps(config))


def write_fp8(folder: Path) -> None:
    """Makes 8-bit floats of the layers' weights, with a scale for each output."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in filter(is_layer, list(tensors)):
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.ones(len(tensors[name]), 1)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fbgemm_fp8"}
    (folder / "config.json").write_text(json.dumps(config))


def write_gguf(folder: Path) -> None:
    """Makes what a Q4_K_M file of the model becomes."""
    sys.path.insert(0, str(Path(__file__).parent / "peers"))
    from gguf_model import converted

    from rayfin.actors.runner.quantized.gguf_file import convert

    file = converted(folder, "q4_K_M")
    convert([str(file)], str(folder))
    file.unlink()


def write_encoder(folder: Path, options: argparse.Namespace) -> None:
    """A BERT of random weights."""
    import torch
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(
        "bert",
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=1,
        num_attention_heads=options.hidden // 64,
    )
    make: Any = AutoModel
    make.from_config(config, dtype=getattr(torch, options.stored)).save_pretrained(folder)


def write_images(folder: Path, options: argparse.Namespace) -> None:
    """A LLaVA of random weights: a tower of CLIP before a Llama."""
    import torch
    from images import Sizes, make_model
    from safetensors.torch import load_file, save_file

    inner, layers = 11 * options.hidden // 4, options.layers
    make_model(folder, "llava", Sizes(options.hidden, inner, layers, layers, 224, 28))
    path, dtype = folder / "model.safetensors", getattr(torch, options.stored)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})


def load_ranks(folder: str, settings: dict[str, Any], ranks: int) -> dict[str, Memory]:
    """What ``load`` measures on the first of the ranks, which all load at once."""
    if ranks == 1:
        return load(folder, settings)
    import socket

    with socket.socket() as probe:  # a store of this process would be among what is measured
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    store = context.Process(target=serve_store, args=(port,), daemon=True)
    others = [
        context.Process(target=load, args=(folder, settings, (rank, ranks, port)))
        for rank in range(1, ranks)
    ]
    for process in (store, *others):
        process.start()
    measured = load(folder, settings, (0, ranks, port))
    for process in others:
        process.join()
    store.kill()
    return measured


def serve_store(port: int) -> None:
    """Keeps the store in which ranks find each other, until it is killed."""
    import torch.distributed as dist

    store = dist.TCPStore(HOST, port, None, True, wait_for_workers=False)
    threading.Event().wait()
    del store


def load(
    folder: str, settings: dict[str, Any], place: tuple[int, int, int] | None = None
) -> dict[str, Memory]:
    """Loads the model as a runner does; MiB before, at the peak and after.

    Args:
        place: the rank, the number of ranks and the port of their store.
    """
    from rayfin.actors.config import EngineArgs
    from rayfin.actors.runner.model_runner import ModelRunner
    from rayfin.actors.runner.parallel.rank import ParallelRank

    rank = place and ParallelRank(*place[:2], 1, (HOST, place[2]), HOST)
    import_images(folder)
    gc.collect()
    before = memory()
    peak, ended = dict(before), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            for kind, size in memory().items():
                peak[kind] = max(peak[kind], size)
            time.sleep(INTERVAL)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        runner = ModelRunner(EngineArgs(**{"model": folder, "device": "cpu", **settings}), rank)
    finally:
        ended.set()
        watcher.join()
    gc.collect()
    after = memory()
    del runner
    return {"before": before, "peak": peak, "after": after}


def import_images(folder: str) -> None:
    """Imports what a model that reads images needs beside what any model needs."""
    if not (Path(folder) / "preprocessor_config.json").exists():
        return
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from rayfin.actors.config import EngineArgs
    from rayfin.actors.media.image_processor import ImageProcessor

    ImageProcessor.load(EngineArgs(model=folder))
    make: Any = AutoModelForImageTextToText
    with torch.device("meta"):
        make.from_config(AutoConfig.from_pretrained(folder))


def memory() -> Memory:
    """What this process has now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {
        kind: sum(int(fields[name].split()[0]) for name in names) / 1024
        for kind, names in KINDS.items()
    }


if __name__ == "__main__":
    sys.exit(main())
