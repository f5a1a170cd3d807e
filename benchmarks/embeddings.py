"""Embeddings of Rayfin beside sentence-transformers' and vLLM's, of a model of a real size.

    python benchmarks/embeddings.py --sentences 2000 --vllm-python /path/of/its/python
    python benchmarks/embeddings.py --model qwen3-0.6b --layers 7 --instruction 200 --sentences 100

``--instruction`` begins every text with so many words that all share. The model has random weights
and a vocabulary of words. Each engine runs in a process of its own, with the same threads, in
turns; the vectors of all must agree. The time of CPU is what counts on a machine where other work
goes on.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BERT: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
"""BERT-base."""

QWEN3: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
"""Qwen3-Embedding-0.6B, but for its vocabulary, which an embedding only looks up."""

MAX_LENGTH = 512

SYLLABLES = ("ba", "do", "fi", "ga", "ka", "lo", "mi", "ne", "po", "ra", "su", "ti")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
SHORTEST, LONGEST, MEDIAN = 4, 120, 18  # words of a sentence
TOLERANCE = 1e-3
Encode = Callable[[list[str]], Any]
Times = tuple[float, float]
NEVER = (float("inf"), float("inf"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--model", choices=("bert", "qwen3-0.6b"), default="bert")
    parser.add_argument("--layers", type=int, help="all that such a model has, if not given")
    parser.add_argument("--instruction", type=int, default=0, help="words before each text")
    parser.add_argument("--engines", default="rayfin,sentence-transformers,vllm")
    parser.add_argument("--vllm-python", help="the Python that has vllm; without it, no vllm")
    parser.add_argument("--child", choices=tuple(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(ENGINES[options.child](options.folder, options.threads), options.folder)
    names = options.engines.split(",")
    if not options.vllm_python:
        names = [name for name in names if name != "vllm"]
    with tempfile.TemporaryDirectory() as folder:
        write = {"bert": write_bert, "qwen3-0.6b": write_qwen3}[options.model]
        write(Path(folder), {} if options.layers is None else {"num_hidden_layers": options.layers})
        shared = " ".join(random.Random(2).choices(words(), k=options.instruction))
        # Other texts in each round, and in the first one, which warms up: no cache knows them.
        rounds = [
            [f"{shared} {text}".strip() for text in sentences(count, seed)]
            for seed, count in enumerate([8] + [options.sentences] * options.rounds)
        ]
        Path(folder, "texts.json").write_text(json.dumps(rounds))
        peers = {name: start(name, options, folder) for name in names}
        best: dict[str, Times] = {}
        for number in range(1, 1 + options.rounds):
            for name, peer in peers.items():
                best[name] = min(best.get(name, NEVER), ask(peer, number))
        for peer in peers.values():
            peer.communicate("stop\n")
        agree(Path(folder), names)
    texts = rounds[-1]
    length = sum(len(text.split()) for text in texts) / len(texts)
    print(f"{len(texts)} sentences of {length:.1f} words, {options.threads} threads")
    for name, (seconds, cpu) in best.items():
        ratios = [one / other for one, other in zip(best[name], best[names[0]], strict=True)]
        print(
            f"{name:22} {len(texts) / seconds:8.1f} sentences/s ({cpu:.1f} s of CPU); "
            f"{names[0]} is {ratios[0]:.2f} x ({ratios[1]:.2f} x)"
        )
    return 0


def start(name: str, options: argparse.Namespace, folder: str) -> "subprocess.Popen[str]":
    """A process that loads an engine; for each line it computes the texts of that round."""
    python = options.vllm_python if name == "vllm" else sys.executable
    arguments = ["--child", name, "--folder", folder, "--threads", str(options.threads)]
    return subprocess.Popen(
        [python, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if options.rounds > 9 else subprocess.DEVNULL,
        text=True,
    )


def ask(peer: "subprocess.Popen[str]", number: int) -> Times:
    """Seconds for all texts, of time and of CPU."""
    assert peer.stdin is not None and peer.stdout is not None
    peer.stdin.write(f"{number}\n")
    peer.stdin.flush()
    for line in peer.stdout:
        if line.startswith("seconds "):
            _, seconds, cpu = line.split()
            return float(seconds), float(cpu)
    raise RuntimeError(f"{peer.args!r} has ended")


def child(encode: Encode, folder: str) -> int:
    import numpy as np

    rounds = json.loads(Path(folder, "texts.json").read_text())
    encode(rounds[0])
    for line in sys.stdin:
        if line.strip() == "stop":
            break
        texts = rounds[int(line)]
        began, cpu = time.perf_counter(), time.process_time()
        vectors = encode(texts)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        name = sys.argv[sys.argv.index("--child") + 1]
        np.save(Path(folder, f"{name}.npy"), np.asarray(vectors, np.float32))
        print(f"seconds {seconds} {cpu}", flush=True)
    return 0


def agree(folder: Path, names: list[str]) -> None:
    """Raises:
    AssertionError: two engines have other vectors.
    """
    import numpy as np

    first = np.load(folder / f"{names[0]}.npy")
    for name in names[1:]:
        difference = float(np.abs(np.load(folder / f"{name}.npy") - first).max())
        assert difference < TOLERANCE, f"{name} differs by {difference}"


def rayfin(folder: str, threads: int) -> Encode:
    from rayfin import LLM

    llm = LLM(folder, threads=threads)
    return lambda texts: [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


def sentence_transformers(folder: str, threads: int) -> Encode:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(folder, device="cpu")
    return lambda texts: model.encode(texts, show_progress_bar=False)


def vllm(folder: str, threads: int) -> Encode:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    from vllm import LLM

    llm = LLM(folder, runner="pooling", dtype="float32", max_model_len=MAX_LENGTH)
    return lambda texts: [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


ENGINES: dict[str, Callable[[str, int], Encode]] = {
    "rayfin": rayfin,
    "sentence-transformers": sentence_transformers,
    "vllm": vllm,
}


def sentences(count: int, seed: int) -> list[str]:
    """Texts of words; most are short and some long, as sentences are."""
    draw, known = random.Random(seed), words()
    lengths = [round(draw.lognormvariate(0, 0.7) * MEDIAN) for _ in range(count)]
    return [
        " ".join(draw.choices(known, k=min(LONGEST, max(SHORTEST, length)))) for length in lengths
    ]


def words() -> list[str]:
    return [a + b + c for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES]


def write_bert(folder: Path, changed: dict[str, Any]) -> None:
    """A BERT of random weights as sentence-transformers writes it: mean, length one."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    BertModel(BertConfig(**BERT | changed), add_pooling_layer=False).save_pretrained(folder)
    write_text_side(
        folder, "[CLS] $A [SEP]", ("input_ids", "token_type_ids", "attention_mask"), "right"
    )
    write_modules(folder, BERT["hidden_size"], "mean")


def write_qwen3(folder: Path, changed: dict[str, Any]) -> None:
    """A decoder of random weights whose last token is the vector."""
    import torch
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    Qwen3Model(Qwen3Config(**QWEN3 | changed)).save_pretrained(folder)
    write_text_side(folder, "$A [SEP]", ("input_ids", "attention_mask"), "left")
    write_modules(folder, QWEN3["hidden_size"], "lasttoken")


def write_text_side(folder: Path, template: str, inputs: Sequence[str], side: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: place for place, word in enumerate([*SPECIAL, *words()])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"},
        model_input_names=list(inputs),
        padding_side=side,
    ).save_pretrained(folder)


def write_modules(folder: Path, size: int, pooling: str) -> None:
    """The files that make a folder one of sentence-transformers'."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [
        {
            **{"idx": place, "name": str(place), "path": path},
            "type": f"sentence_transformers.models.{name}",
        }
        for place, (path, name) in enumerate(modules)
    ]
    files: dict[str, Any] = {
        "modules.json": listed,
        "1_Pooling/config.json": {"word_embedding_dimension": size, "pooling_mode": pooling},
        "sentence_bert_config.json": {"max_seq_length": MAX_LENGTH},
        "config_sentence_transformers.json": {},
    }
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))


if __name__ == "__main__":
    sys.exit(main())
