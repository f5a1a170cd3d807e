"""Whisper: seconds of speech written down in a second, beside transformers and CTranslate2.

    python benchmarks/speech.py --shape small --peer ctranslate2=PYTHON

Models have random weights and the sizes of OpenAI's. Each clip has 30 seconds, as the encoder pads
them anyway, and ``--tokens`` tokens are written for it, greedily. Engines take turns, each in a
process of its own, with all clips at once; features are part of the time, loading is not.
CTranslate2 is faster-whisper's engine (`pip install ctranslate2 "transformers<5" torch`).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from peers.speech import CONTROL, PROMPT, RATE, TIMES, measure, timed

SHAPES = {  # hidden, layers of the encoder and the decoder, heads, mels
    "tiny": (384, 4, 4, 6, 80),
    "base": (512, 6, 6, 8, 80),
    "small": (768, 12, 12, 12, 80),
    "turbo": (1280, 32, 4, 20, 128),
}
VOCABULARY = 51866


def make_model(folder: Path, shape: str) -> None:
    """Writes a random model of OpenAI's sizes, with a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        GenerationConfig,
        PreTrainedTokenizerFast,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    text = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*text, *CONTROL, *TIMES]
    ids = {name: at for at, name in enumerate(names)}
    backend = Tokenizer(models.BPE(ids, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = CONTROL[0]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=end, eos_token=end, pad_token=end, unk_token=end
    )
    tokenizer.add_tokens(list(CONTROL[1:]), special_tokens=True)
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings = {name: settings[name] for name in settings if not name.startswith("extra_special")}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # an older transformers reads it too
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    hidden, encoder, decoder, heads, mels = SHAPES[shape]
    extractor: object = WhisperFeatureExtractor(feature_size=mels)
    extractor.save_pretrained(folder)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), ids[end])
    start = ids["<|startoftranscript|>"]
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=mels,
            d_model=hidden,
            encoder_layers=encoder,
            decoder_layers=decoder,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=4 * hidden,
            decoder_ffn_dim=4 * hidden,
            decoder_start_token_id=start,
            architectures=["WhisperForConditionalGeneration"],
            **ends,
        )
    )
    model.generation_config = GenerationConfig(
        decoder_start_token_id=start,
        no_timestamps_token_id=ids["<|notimestamps|>"],
        is_multilingual=True,
        lang_to_id={"<|en|>": ids["<|en|>"]},
        task_to_id={name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")},
        max_length=448,
        **ends,
    )
    model.save_pretrained(folder)


def rayfin(folder: str, clips: int, tokens: int) -> float:
    """Seconds of ``LLM.generate``."""
    from rayfin import LLM, SamplingParams

    llm = LLM(folder)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompt = "".join(f"<|{name}|>" for name in ("startoftranscript", "en", "transcribe"))

    def write(samples: Sequence[object]) -> int:
        asked = [
            {"prompt": f"{prompt}<|notimestamps|>", "multi_modal_data": {"audio": (sample, RATE)}}
            for sample in samples
        ]
        outputs = llm.generate(asked, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return timed(write, clips, tokens)


def transformers(folder: str, clips: int, tokens: int) -> float:
    """Seconds of transformers' ``generate`` over one batch; its weights are in float32."""
    import torch
    from transformers import GenerationMixin, WhisperFeatureExtractor
    from transformers import WhisperForConditionalGeneration as Model

    model = Model.from_pretrained(folder)
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    settings = model.generation_config
    settings.max_length = settings.eos_token_id = None

    @torch.inference_mode()
    def write(samples: Sequence[object]) -> int:
        features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        # Not Whisper's own generate, which hears a clip again from the last time in an answer.
        ids = GenerationMixin.generate(
            model,
            features,
            decoder_input_ids=torch.tensor([PROMPT] * len(samples)),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )
        return int((ids.shape[1] - len(PROMPT)) * len(samples))

    return timed(write, clips, tokens)


ENGINES: dict[str, Callable[[str, int, int], float]] = {
    "rayfin": rayfin,
    "transformers": transformers,
}


def commands(folder: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """Name -> the command of an engine, without the numbers of clips and tokens."""
    commands = {
        name: [sys.executable, __file__, "--folder", str(folder), "--engine", name]
        for name in ENGINES
    }
    for peer in options.peer:
        name, _, python = peer.partition("=")
        file = Path(__file__).parent / "peers" / f"{name}_speech.py"
        commands[name] = [python, str(file), "--folder", str(folder)]
    return commands


def compare(folder: Path, options: argparse.Namespace) -> None:
    """Prints a row for each engine."""
    seconds: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, command in commands(folder, options).items():
            numbers = ["--clips", str(options.clips), "--tokens", str(options.tokens)]
            done = subprocess.run([*command, *numbers], stdout=subprocess.PIPE, check=True)
            seconds.setdefault(name, []).append(float(done.stdout.split()[-1]))
    print(
        f"Whisper {options.shape}, {options.clips} clips of 30 s at once, {options.tokens} tokens"
    )
    best = statistics.median(seconds["rayfin"])
    for name, times in seconds.items():
        middle = statistics.median(times)
        speech = 30 * options.clips / middle
        print(f"{name:14} {middle:7.2f} s, {speech:6.1f} s of speech a second, {middle / best:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--clips", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="append", default=[], help="NAME=PYTHON: ctranslate2")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        measure(ENGINES[options.engine], options)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.shape)
        compare(Path(folder), options)


if __name__ == "__main__":
    main()
