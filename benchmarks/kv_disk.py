"""Pages on a disk (--kv-disk-path): a prompt's first token cold, again, and after a restart.

    python benchmarks/kv_disk.py --shape 0.6b --prompt 2000
    python benchmarks/kv_disk.py --nothing     # what it costs where there is nothing to find

Each engine has the same random weights. "restart" is a new engine, which finds the pages that the
one before has written; its first token is compared with that one's. With --nothing every prompt is
new, and a run with the folder and one without take turns.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from shapes import SHAPES

from rayfin import LLM, SamplingParams


def make(folder: Path, shape: str, pages: Path | None, options: argparse.Namespace) -> LLM:
    family, sizes = SHAPES[shape]
    config = {"model_type": family, "max_position_embeddings": 8192, **sizes}
    if not (folder / "config.json").exists():  # a file that changes is another model
        (folder / "config.json").write_text(json.dumps(config))
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=options.dtype,
        threads=options.threads,
        max_model_len=options.prompt + 256,
        kv_cache_memory=6 << 30,
        spec_method="none",
        kv_disk_path=None if pages is None else str(pages),
    )


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int, int]:
    """Seconds until the first token of a greedy answer, that token, and tokens found cached."""
    params, started = SamplingParams(temperature=0, max_tokens=1), time.perf_counter()
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return seconds, output.outputs[0].token_ids[0], output.num_cached_tokens or 0


def compare(folder: Path, options: argparse.Namespace) -> None:
    """The same prompt on an engine without its pages, with them, and on a new one."""
    draw, pages = random.Random(0), folder / "pages"
    times: dict[str, list[float]] = {"cold": [], "again": [], "restart": []}
    for _ in range(options.rounds):
        prompt = [draw.randrange(1000) for _ in range(options.prompt)]
        llm = make(folder, options.shape, pages, options)
        first_token(llm, [1] * 40)  # touches the weights
        answers = {}
        for kind in ("cold", "again"):
            seconds, *answers[kind] = first_token(llm, prompt)
            times[kind].append(seconds)
        llm.close()
        llm = make(folder, options.shape, pages, options)
        first_token(llm, [1] * 40)
        seconds, *answers["restart"] = first_token(llm, prompt)
        times["restart"].append(seconds)
        llm.close()
        assert len({token for token, _ in answers.values()}) == 1, answers
        assert answers["restart"][1] > options.prompt - 32, "it was not read"
    size = sum(path.stat().st_size for path in pages.rglob("*.page")) / options.rounds
    cold = statistics.median(times["cold"])
    print(f"{options.shape}, {options.prompt} tokens, {size / 2**20:.0f} MiB of files a prompt")
    for kind, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{kind:8} {1e3 * median:8.0f} ms to the first token, {median / cold:.3f} of cold")


def cost(folder: Path, options: argparse.Namespace) -> None:
    """Requests whose prompts are all new, with the folder and without."""
    draw, ratios = random.Random(0), []
    llms = {with_it: make(folder, options.shape, with_it, options) for with_it in (None, folder)}
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for _ in range(options.rounds):
        seconds = {}
        for with_it, llm in llms.items():
            prompts = [[draw.randrange(1000) for _ in range(256)] for _ in range(options.streams)]
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds[with_it] = time.perf_counter() - started
        ratios.append(seconds[None] / seconds[folder])
    print(
        f"{options.shape}, {options.streams} streams: tokens a second with the folder "
        f"{statistics.median(ratios):.3f} of those without ({min(ratios):.3f} to {max(ratios):.3f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="135m", choices=SHAPES)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16, help="of --nothing")
    parser.add_argument("--nothing", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (cost if options.nothing else compare)(Path(folder), options)


if __name__ == "__main__":
    main()
