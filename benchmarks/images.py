"""What images cost: requests with one, a second question about one, and text streams beside some.

    python benchmarks/images.py --peer vllm_cpu=/opt/vllm/bin/python [--rounds 3]
    python benchmarks/images.py --family qwen2_vl ...       # the shape of Qwen2-VL, not of LLaVA
    python benchmarks/images.py --sizes tiny --requests 4 --rounds 1

A peer is a script of peers/ that takes images, with the Python of its environment; it gets the same
files, prompts and times of arrival in turns. Every image but that of a second question is new.
"tokens/s": --requests requests at once, each with an image and --prompt tokens, --output out.
"first", "second": time to the first token of two questions about an image, one after the other.
"alone", "beside": p99 of the gaps in 8 streams of text, and while 8 images arrive.
"text": tokens/s of as many tokens without images; the last line is a model of text alone.
Processors run in the engine's own thread everywhere, so that they count.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from turns import Peer, PeerSpec

import rayfin.deployments.demo
from rayfin.deployments.bench.measures import Timeline, figures
from rayfin.deployments.bench.report import median
from rayfin.deployments.bench.workload import Job, Lengths, random_jobs

PLACES = {
    "llava": ["<image>"],
    "qwen2_vl": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"],
}
"""What a prompt has for an image, by family."""
VIDEO = "<|video_pad|>"
POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model of 64 channels a head; a token of an image is of ``patch`` by ``patch`` pixels."""

    hidden: int
    inner: int
    layers: int
    tower_layers: int
    pixels: int  # of an image, in width and in height
    patch: int

    @property
    def heads(self) -> int:
        return self.hidden // 64

    @property
    def image_tokens(self) -> int:
        return (self.pixels // self.patch) ** 2


SIZES = {
    "100m": Sizes(hidden=512, inner=1536, layers=20, tower_layers=12, pixels=448, patch=28),
    "tiny": Sizes(hidden=128, inner=256, layers=2, tower_layers=2, pixels=112, patch=28),
}


def make_model(folder: Path, family: str, sizes: Sizes) -> list[int]:
    """Saves a model; returns the ids that a prompt has for an image."""
    tokenizer = _tokenizer(family)
    ids = tokenizer.convert_tokens_to_ids
    places: list[int] = [ids(token) for token in PLACES[family]]
    text = _text(len(tokenizer), sizes)
    if family == "llava":
        config = _llava(text, sizes, places[0])
        images = _clip_images(sizes)
    else:
        config = _qwen(text, sizes, places, ids(VIDEO))
        images = _qwen_images(sizes)
    torch.manual_seed(0)
    whole = AutoConfig.for_model(family, tie_word_embeddings=False, **config)
    AutoModelForImageTextToText.from_config(whole, dtype=torch.float32).save_pretrained(folder)
    if family == "llava":
        _rename_tower(folder / "model.safetensors")
    tokenizer.save_pretrained(folder)
    settings: dict[str, Any] = {"processor_class": "Qwen2VLProcessor"}
    if family == "llava":
        settings = {
            "processor_class": "LlavaProcessor",
            "patch_size": sizes.patch,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
            "image_token": PLACES[family][0],
        }
    (folder / "processor_config.json").write_text(json.dumps(settings))
    images |= {"processor_class": settings["processor_class"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return places


def _rename_tower(path: Path) -> None:
    """Gives a tower's weights the names of published checkpoints, which all engines read."""
    new = "vision_tower.vision_model."
    weights = {
        name if name.startswith(new) else name.replace("vision_tower.", new): value
        for name, value in load_file(path).items()
    }
    save_file(weights, path, {"format": "pt"})


def make_text_model(folder: Path, family: str, sizes: Sizes) -> None:
    """Saves a model of text alone with the sizes of a language model of ``make_model``."""
    tokenizer = _tokenizer(family)
    kind = "llama" if family == "llava" else "qwen2"
    config = AutoConfig.for_model(kind, **_text(len(tokenizer), sizes))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(family: str) -> Any:
    (demo,) = rayfin.deployments.demo.__path__
    tokenizer = AutoTokenizer.from_pretrained(Path(demo) / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": [*PLACES[family], VIDEO]})
    return tokenizer


def _text(vocab_size: int, sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads // 2,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
    }


def _llava(text: dict[str, Any], sizes: Sizes, place: int) -> dict[str, Any]:
    tower = {
        "model_type": "clip_vision_model",
        "hidden_size": sizes.hidden,
        "intermediate_size": 4 * sizes.hidden,
        "projection_dim": sizes.hidden,
        "num_hidden_layers": sizes.tower_layers,
        "num_attention_heads": sizes.heads,
        "image_size": sizes.pixels,
        "patch_size": sizes.patch,
    }
    return {
        "vision_config": tower,
        "text_config": {"model_type": "llama", **text},
        "image_token_index": place,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }


def _clip_images(sizes: Sizes) -> dict[str, Any]:
    crop = {"height": sizes.pixels, "width": sizes.pixels}
    size = {"shortest_edge": sizes.pixels}
    return {"image_processor_type": "CLIPImageProcessor", "size": size, "crop_size": crop}


def _qwen(text: dict[str, Any], sizes: Sizes, places: list[int], video: int) -> dict[str, Any]:
    tower = {
        "depth": sizes.tower_layers,
        "embed_dim": sizes.hidden,
        "hidden_size": sizes.hidden,
        "num_heads": sizes.heads,
        "mlp_ratio": 4,
        "patch_size": sizes.patch // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    start, image, end = places
    return {
        "vision_config": tower,
        "text_config": {"model_type": "qwen2_vl_text", **text, "rope_parameters": rope},
        "vision_start_token_id": start,
        "image_token_id": image,
        "vision_end_token_id": end,
        "video_token_id": video,
    }


def _qwen_images(sizes: Sizes) -> dict[str, Any]:
    side = sizes.patch // 2
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": side,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": (4 * side) ** 2, "longest_edge": sizes.pixels**2},
    }


PEERS = Path(__file__).with_name("peers")
OURS, TEXT = "rayfin", "text model"
VOCABULARY = 2000
STREAMS = 8  # of text, beside as many images
BARS = {"tokens/s": 1.3, "beside": 0.6}  # Rayfin's, divided by a peer's: at least, at most
SECOND = 0.25  # most of a second question's time, as a share of the first one's
HEADER = (
    "engine",
    "tokens/s",
    "first, ms",
    "second, ms",
    "second / first",
    "alone, ms",
    "beside, ms",
    "beside / alone",
    "text",
)


class Pictures:
    """A folder of pictures that no engine has seen: 0.png, 1.png and so on."""

    def __init__(self, folder: Path, pixels: int) -> None:
        self.folder = folder
        self._pixels = pixels
        self._draw = np.random.default_rng(0)
        self._count = 0

    def new(self) -> int:
        """Draws a picture; returns its number."""
        blocks = self._draw.integers(0, 256, (16, 16, 3), np.uint8)
        side = (self._pixels, self._pixels)
        Image.fromarray(blocks, "RGB").resize(side).save(self.folder / f"{self._count}.png")
        self._count += 1
        return self._count - 1


@dataclass(slots=True)
class Rounds:
    """Figures of an engine, one of each round: tokens a second, and seconds."""

    batch: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    text: list[float] = field(default_factory=list)


def about(image: int, job: Job, arrival: float = 0.0) -> Job:
    """The job with an image before its tokens: id -1 - N stands for picture N (``peers/``)."""
    return Job((-1 - image, *job.prompt), job.output_tokens, arrival)


@dataclass(slots=True)
class Workloads:
    """The jobs of rounds, which are the same for all engines."""

    pictures: Pictures
    requests: int
    prompt: int
    output: int
    image_tokens: int

    def texts(self, count: int, prompt: int, output: int, seed: int) -> list[Job]:
        lengths = Lengths(prompt, prompt), Lengths(output, output)
        return random_jobs(count, *lengths, vocabulary=VOCABULARY, seed=seed)

    def batch(self, seed: int) -> list[Job]:
        """Requests with an image each, all at once."""
        texts = self.texts(self.requests, self.prompt, self.output, seed)
        return [about(self.pictures.new(), job) for job in texts]

    def without_images(self, seed: int) -> list[Job]:
        """As many tokens, all of them text."""
        return self.texts(self.requests, self.prompt + self.image_tokens, self.output, seed)

    def questions(self, seed: int) -> tuple[Job, Job]:
        """Two questions about one image."""
        image = self.pictures.new()
        first, second = self.texts(2, self.prompt, 4, seed)
        return about(image, first), about(image, second)

    def streams(self, seed: int) -> list[Job]:
        """Streams of text."""
        return self.texts(STREAMS, 64, 5 * self.output, seed)

    def arriving(self, seconds: float, seed: int) -> list[Job]:
        """As many requests with an image, from a tenth of ``seconds`` to eight."""
        texts = self.texts(STREAMS, self.prompt, 4, seed)
        times = [seconds * (1 + at) / (STREAMS + 2) for at in range(STREAMS)]
        return [about(self.pictures.new(), *pair) for pair in zip(texts, times, strict=True)]


def measure(peers: Sequence[Peer], work: Workloads, rounds: int) -> dict[str, Rounds]:
    """Runs the workloads on all engines in turns; an uncounted round warms up."""
    results = {peer.spec.name: Rounds() for peer in peers}
    seeing = [peer for peer in peers if peer.spec.name != TEXT]
    for number in range(rounds + 1):
        seed = 10 * number
        one = {name: Rounds() for name in results}
        batch, text = work.batch(seed), work.without_images(seed + 1)
        for peer in peers:
            one[peer.spec.name].text.append(speed(peer.run(text)))
        for peer in seeing:
            one[peer.spec.name].batch.append(speed(peer.run(batch)))
        questions = work.questions(seed + 2)
        for peer in seeing:
            for column, job in zip(("first", "second"), questions, strict=True):
                (timeline,) = answered(peer.run([job]))
                getattr(one[peer.spec.name], column).append(timeline.ttft or 0.0)
        streams = work.streams(seed + 3)
        quickest = float("inf")
        for peer in seeing:
            alone = answered(peer.run(streams))
            one[peer.spec.name].alone.append(gap(alone))
            quickest = min(quickest, *(line.e2el or 0.0 for line in alone))
        both = [*work.streams(seed + 4), *work.arriving(quickest, seed + 5)]
        for peer in seeing:
            one[peer.spec.name].beside.append(gap(answered(peer.run(both))[:STREAMS]))
        if number:
            for name, latest in one.items():
                for column in Rounds.__slots__:
                    getattr(results[name], column).extend(getattr(latest, column))
    return results


def answered(timelines: Sequence[Timeline]) -> Sequence[Timeline]:
    """The same timelines; a failed one is no figure."""
    errors = [line.error for line in timelines if line.error is not None]
    assert not errors, errors[0]
    return timelines


def speed(timelines: Sequence[Timeline]) -> float:
    """Output tokens a second."""
    return figures(answered(timelines)).output_per_second


def gap(timelines: Sequence[Timeline]) -> float:
    """p99 of the seconds between tokens."""
    return figures(timelines).itl.p99 or 0.0


def rows(results: dict[str, Rounds]) -> list[list[str]]:
    """A row for each engine: medians over its rounds."""
    lines = []
    for name, rounds in results.items():
        if not rounds.batch:
            lines.append([name, *[""] * 7, f"{median(rounds.text):.1f}"])
            continue
        first, second, alone, beside = (
            1000 * median(values)
            for values in (rounds.first, rounds.second, rounds.alone, rounds.beside)
        )
        lines.append(
            [
                name,
                f"{median(rounds.batch):.1f}",
                f"{first:.1f}",
                f"{second:.1f}",
                f"{second / max(first, 1e-9):.2f}",
                f"{alone:.1f}",
                f"{beside:.1f}",
                f"{beside / max(alone, 1e-9):.2f}",
                f"{median(rounds.text):.1f}",
            ]
        )
    return lines


def verdicts(results: dict[str, Rounds]) -> list[str]:
    """A line for each bar: Rayfin's figure and what it is held to."""
    ours = results[OURS]
    share = median(ours.second) / max(median(ours.first), 1e-9)
    lines = [f"second / first: {share:.2f} (at most {SECOND})"]
    if TEXT in results:
        share = median(ours.text) / max(median(results[TEXT].text), 1e-9)
        lines.append(f"text / that of a model of text alone: {share:.2f} (at least 0.98)")
    for name, rounds in results.items():
        if name in (OURS, TEXT):
            continue
        share = median(ours.batch) / max(median(rounds.batch), 1e-9)
        lines.append(f"tokens/s / {name}'s: {share:.2f} (at least {BARS['tokens/s']})")
        share = median(ours.beside) / max(median(rounds.beside), 1e-9)
        lines.append(f"beside / {name}'s: {share:.2f} (at most {BARS['beside']})")
    return lines


def table(lines: Sequence[Sequence[str]]) -> str:
    """The rows in Markdown."""
    whole = [HEADER, ["---"] * len(HEADER), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in whole)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peer", action="append", default=[], help="[LABEL:]NAME=PYTHON,key=value")
    parser.add_argument("--settings", default="threads=2", help="settings of Rayfin: key=value,...")
    parser.add_argument("--family", choices=["llava", "qwen2_vl"], default="llava")
    parser.add_argument("--sizes", choices=SIZES, default="100m")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of text")
    parser.add_argument("--output", type=int, default=32, help="tokens of an output")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args(arguments)


def specs(options: argparse.Namespace, folder: Path, places: list[int]) -> list[PeerSpec]:
    """Rayfin, the peers, and Rayfin with a model of text alone."""
    limits = "max_model_len=4096"
    seeing = f"{OURS}:rayfin_engine={sys.executable},{limits},{options.settings}"
    text = f"{TEXT}:rayfin_engine={sys.executable},{limits},{options.settings}"
    listed = [PeerSpec.parse(peer, PEERS) for peer in (seeing, *options.peer)]
    for spec in listed:
        spec.settings.setdefault("max_model_len", 4096)
        spec.settings.update(images=str(folder), image_place=places)
    return [*listed, PeerSpec.parse(text, PEERS)]


def main() -> None:
    options = parse()
    sizes: Sizes = SIZES[options.sizes]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pictures = folder / "pictures"
        pictures.mkdir()
        places = make_model(folder / "model", options.family, sizes)
        make_text_model(folder / "text", options.family, sizes)
        peers = []
        for spec in specs(options, pictures, places):
            model = folder / ("text" if spec.name == TEXT else "model")
            peers.append(stack.enter_context(Peer(spec, model, folder / f"{spec.name}.log")))
            print(f"{spec.name}: {peers[-1].version}, ready in {peers[-1].ready_seconds:.1f} s")
        work = Workloads(
            Pictures(pictures, sizes.pixels),
            options.requests,
            options.prompt,
            options.output,
            sizes.image_tokens,
        )
        results = measure(peers, work, options.rounds)
    print(table(rows(results)), *verdicts(results), sep="\n")


if __name__ == "__main__":
    main()
