"""What `speech.py` and its peers share: clips, control tokens, and the time of an engine."""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

RATE, SECONDS = 16000, 30
CONTROL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|zh|>"),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"),
    "<|notimestamps|>",
)
TIMES = tuple(f"<|{at * 0.02:.2f}|>" for at in range(1501))
PROMPT = [257, 258, 263, 267]  # ids of a transcript in English without times, behind 256 bytes


def draw(count: int, seed: int) -> list[Any]:
    """Clips [N] of noise."""
    drawn = np.random.default_rng(seed)
    return [(0.1 * drawn.standard_normal(RATE * SECONDS)).astype(np.float32) for _ in range(count)]


def timed(write: Callable[[Sequence[Any]], int], clips: int, tokens: int) -> float:
    """Seconds in which ``write`` makes transcripts of so many new clips."""
    write(draw(1, 1))  # touches the weights
    samples = draw(clips, 2)
    started = time.perf_counter()
    count = write(samples)
    seconds = time.perf_counter() - started
    assert count == clips * tokens, f"{count} tokens of {clips} clips"
    return seconds


def measure(engine: Callable[[str, int, int], float], options: argparse.Namespace) -> None:
    """Prints the seconds of an engine, last."""
    print(engine(str(options.folder), options.clips, options.tokens))


def peer(engine: Callable[[str, int, int], float]) -> None:
    """The command line of a peer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--clips", type=int)
    parser.add_argument("--tokens", type=int)
    measure(engine, parser.parse_args())
