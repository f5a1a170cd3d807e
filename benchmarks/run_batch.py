"""``rayfin run-batch`` beside ``vllm run-batch``: the same file of chats, the same model.

    python benchmarks/run_batch.py --lines 2000 --vllm /path/of/its/bin/vllm

Prompts have 50 to 400 words and answers 20 to 120 tokens (W1 of engines.py). The model has the
sizes of ``--shape`` and random weights. The time is that of the whole command less that of one
with a single line, so loading does not count.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from embeddings import SPECIAL, words
from server import RAYFIN
from shapes import SHAPES

PROMPT, OUTPUT = (50, 400), (20, 120)
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=32)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="135m")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--vllm", help="vLLM's command; without it, Rayfin alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", options.shape)
        rates: dict[str, float] = {}
        for engine, command in commands(options, folder).items():
            once = run(folder, command, lines(1, str(folder / "model")))
            seconds = run(folder, command, lines(options.lines, str(folder / "model"))) - once
            rates[engine] = answered(folder, options.lines) / seconds
            print(f"{engine:8} {rates[engine]:8.1f} output tokens/s ({seconds:.1f} s)", flush=True)
    if "vllm" in rates:
        print(f"rayfin is {rates['rayfin'] / rates['vllm']:.2f} x")
    return 0


def commands(options: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """Each engine's command but for its files."""
    model = ["--model", str(folder / "model"), "--dtype", "float32"]
    threads = ["--threads", str(options.threads)]
    found = {"rayfin": [sys.executable, "-c", RAYFIN, "run-batch", *model, *threads]}
    if options.vllm:
        found["vllm"] = [options.vllm, "run-batch", *model]
    return found


def run(folder: Path, command: list[str], text: str) -> float:
    """Seconds of one run; its answers are in ``out``."""
    (folder / "in").write_text(text)
    (folder / "out").unlink(missing_ok=True)
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}
    files = ["-i", str(folder / "in"), "-o", str(folder / "out")]
    with (folder / "log").open("w") as log:
        began = time.perf_counter()
        done = subprocess.run(
            [*command, *files], env={**os.environ, **variables}, stdout=log, stderr=log
        )
        seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError((folder / "log").read_text()[-2000:])
    return seconds


def lines(count: int, model: str) -> str:
    """Chats in OpenAI's form, the same ones for all engines."""
    draw, known = random.Random(1), words()
    found = []
    for number in range(count):
        content = " ".join(draw.choices(known, k=draw.randint(*PROMPT)))
        body = {
            **{"model": model, "messages": [{"role": "user", "content": content}]},
            **{"max_tokens": draw.randint(*OUTPUT), "temperature": 0, "ignore_eos": True},
        }
        url = "/v1/chat/completions"
        line = {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}
        found.append(json.dumps(line) + "\n")
    return "".join(found)


def answered(folder: Path, count: int) -> int:
    """Output tokens of all answers.

    Raises:
        AssertionError: a line has no answer.
    """
    answers = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    bodies = [own["response"]["body"] for own in answers if own["response"]]
    used = [body["usage"]["completion_tokens"] for body in bodies if body and "usage" in body]
    assert len(used) == count, answers[0]
    return sum(used)


def write_model(folder: Path, shape: str) -> None:
    """A decoder of random weights, whose tokens are words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    kind, sizes = SHAPES[shape]
    special = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **sizes, **special, max_position_embeddings=2048)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    names = [*SPECIAL, *words()]
    names += [f"<{place}>" for place in range(len(names), sizes["vocab_size"])]
    vocabulary = {word: place for place, word in enumerate(names)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]"},
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
