"""Tiny random Whisper models with all their files, and what transformers says of clips."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from rayfin.actors.config import EngineArgs
from rayfin.actors.media.audio_processor import AudioProcessor, Samples
from rayfin.actors.media.processed import put_media
from rayfin.actors.media.virtual_ids import put_virtual_ids

RATE, MELS = 16000, 8
WINDOW = 2  # seconds that the encoder hears: 30 of a real one
FRAMES = 50 * WINDOW  # states of its encoder
PAGE_SIZE = 8  # which FRAMES are no whole pages of
POSITIONS = 64  # of its decoder
LANGUAGES = ("en", "de", "fr", "zh")
NAMES = (
    *("<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"),
    "<|notimestamps|>",
)
TIMES = tuple(f"<|{at * 0.02:.2f}|>" for at in range(FRAMES + 1))
TEXT = sorted(pre_tokenizers.ByteLevel.alphabet())
IDS = {name: at for at, name in enumerate((*TEXT, *NAMES, *TIMES))}
EOS = IDS["<|endoftext|>"]
SUPPRESSED = [3, 5, 8, IDS["<|startoftranscript|>"], IDS["<|startofprev|>"], IDS["<|startoflm|>"]]
SUPPRESSED += [IDS["<|translate|>"], IDS["<|transcribe|>"], IDS["<|nospeech|>"]]
FIRST_TIME = IDS["<|0.00|>"]
ONE_TRY = {  # for drawn tones, in which a detector finds no speech, and a model no likely text
    "vad_filter": "false",
    "log_prob_threshold": "-1000",
    "compression_ratio_threshold": "1000",
    "condition_on_previous_text": "false",
    "beam_size": "1",
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, then the control tokens, then the times: in the order of OpenAI's vocabularies."""
    backend = Tokenizer(models.BPE(IDS, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(NAMES[1:])})
    tokenizer.add_tokens(list(TIMES))  # which are no special tokens, as in OpenAI's
    return tokenizer


def make_whisper(folder: Path, seed: int = 0, *, english: bool = False, layers: int = 2) -> Any:
    """Saves a random model with all its files; returns it as transformers runs it.

    Args:
        english: it writes down English only.
    """
    config = WhisperConfig(
        vocab_size=len(IDS),
        num_mel_bins=MELS,
        d_model=32,
        encoder_layers=3,
        decoder_layers=layers,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=FRAMES,
        max_target_positions=POSITIONS,
        pad_token_id=EOS,
        bos_token_id=EOS,
        eos_token_id=EOS,
        decoder_start_token_id=IDS["<|startoftranscript|>"],
        init_std=0.2,
        architectures=["WhisperForConditionalGeneration"],
    )
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 and "norm" not in name:
                parameter.normal_(0.0, 0.2)
            # Else an answer repeats one token, whatever the clip.
            if "encoder_attn" in name and parameter.dim() > 1 or "encoder.conv" in name:
                parameter.mul_(3.0)
            if "decoder.embed_positions" in name:
                parameter.mul_(3.0)
            if "embed_tokens" in name:
                parameter.mul_(0.5)
    settings: dict[str, Any] = {
        "is_multilingual": not english,
        "no_timestamps_token_id": IDS["<|notimestamps|>"],
        "max_initial_timestamp_index": 50,
        "suppress_tokens": SUPPRESSED,
        "begin_suppress_tokens": [TEXT.index("Ġ"), EOS],
        "decoder_start_token_id": IDS["<|startoftranscript|>"],
        "prev_sot_token_id": IDS["<|startofprev|>"],
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "bos_token_id": EOS,
        "max_length": POSITIONS,
        "return_timestamps": False,
    }
    if not english:
        settings["lang_to_id"] = {f"<|{code}|>": IDS[f"<|{code}|>"] for code in LANGUAGES}
        settings["task_to_id"] = {name: IDS[f"<|{name}|>"] for name in ("translate", "transcribe")}
    model.generation_config = GenerationConfig(**settings)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": MELS,
        "sampling_rate": RATE,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": WINDOW,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    return model.eval()


class WhisperOracle:
    """A tiny model as transformers runs it: what the runner must agree with."""

    def __init__(self, folder: Path, seed: int = 0, **options: Any) -> None:
        self.folder = folder
        self.model = make_whisper(folder, seed, **options)
        self._processors: dict[int, AudioProcessor] = {}
        self.processor = self._of_pages(PAGE_SIZE)
        speech = self.processor.transcription.speech
        assert speech is not None
        self.prompts = speech

    def _of_pages(self, page_size: int) -> AudioProcessor:
        if page_size not in self._processors:
            args = EngineArgs(model=str(self.folder), page_size=page_size)
            self._processors[page_size] = AudioProcessor.load(args)
        return self._processors[page_size]

    def prompt(
        self, ids: list[int], clip: Samples, page_size: int = PAGE_SIZE
    ) -> tuple[list[int], Any]:
        """Tokens and the clip of a prompt that begins with the place of one."""
        own = self._of_pages(page_size)
        made = own.process(clip)
        whole, inputs = put_media(ids, [made], own.media_token_id, "prompt", kind="audio")
        ids = put_virtual_ids(np.array(whole, np.int32), inputs, own.media_token_id).tolist()
        return ids, inputs

    @torch.inference_mode()
    def greedy(self, ids: list[int], clip: Samples, max_tokens: int) -> list[int]:
        """What transformers' forward and logits processors give after a prompt, the end included.

        Not ``generate``: it hears a clip again from the last time that an answer has.

        Args:
            ids: a prompt with the place of the clip in front.
        """
        rules, begin = self._rules(ids), len(ids) - 1
        features = torch.from_numpy(self.processor.process(clip).arrays["input_features"])
        heard = self.model.get_encoder()(features)
        tokens = torch.tensor([ids[1:]])
        while tokens.shape[1] < begin + max_tokens and tokens[0, -1] != EOS:
            output = self.model(encoder_outputs=heard, decoder_input_ids=tokens, use_cache=False)
            logits = output.logits[:, -1]
            for rule in rules:
                logits = rule(tokens, logits)
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
        found: list[int] = tokens[0, begin:].tolist()
        return found

    def _rules(self, ids: list[int]) -> list[Any]:
        """transformers' rules for what follows a prompt."""
        settings, begin = self.model.generation_config, len(ids) - 1
        rules: list[Any] = [
            SuppressTokensAtBeginLogitsProcessor(settings.begin_suppress_tokens, begin),
            SuppressTokensLogitsProcessor(settings.suppress_tokens),
        ]
        if ids[-1] != settings.no_timestamps_token_id:
            rules.append(WhisperTimeStampLogitsProcessor(settings, begin))
        return rules

    def windows(
        self, ids: list[int], samples: Samples, window: int, max_tokens: int
    ) -> list[tuple[int, Samples, list[int]]]:
        """Windows of a recording by transformers' rule: where each begins, and its answer.

        Its ``generate`` begins the next one where the last whole sentence ends.
        """
        found: list[tuple[int, Samples, list[int]]] = []
        at, least = 0, 3 * RATE // 10
        while len(samples) - at >= least:
            clip = samples[at : at + window]
            tokens = self.greedy(ids, clip, max_tokens)
            found.append((at, clip, tokens))
            said = torch.tensor([token for token in tokens if token != EOS])
            _, frames = self.model._retrieve_segment(
                seek_sequence=said,
                seek_outputs=[said],
                time_offset=[0.0],
                timestamp_begin=FIRST_TIME,
                seek_num_frames=[len(clip) // 160],
                time_precision=0.02,
                time_precision_features=0.01,
                input_stride=2,
                prev_idx=0,
                idx=0,
                return_token_timestamps=False,
                decoder_input_ids=torch.tensor([ids]),
            )
            at += min(max(int(frames) * 160, least), len(clip))
        return found

    @torch.inference_mode()
    def judged(self, ids: list[int], clip: Samples, answer: list[int]) -> tuple[float, float]:
        """The mean log probability of an answer, and how probable it is that there is no speech."""
        features = torch.from_numpy(self.processor.process(clip).arrays["input_features"])
        whole = torch.tensor([[*ids[1:], *answer]])
        logits = self.model(input_features=features, decoder_input_ids=whole).logits[0]
        begin, total = len(ids) - 1, 0.0
        for place, token in enumerate(answer):
            row = logits[begin + place - 1][None]
            for rule in self._rules(ids):
                row = rule(whole[:, : begin + place], row)
            total += float(row.log_softmax(-1)[0, token])
        start = ids.index(IDS["<|startoftranscript|>"]) - 1
        quiet = float(logits[start].softmax(-1)[IDS["<|nospeech|>"]])
        text = [token for token in answer if token != EOS]
        return total / (len(text) + 1), quiet

    @torch.inference_mode()
    def times(self, ids: list[int], text: list[int], clip: Samples) -> list[float]:
        """When each token of a transcript begins, and the last one ends: transformers' own steps.

        Args:
            ids: a prompt without times.
        """
        features = torch.from_numpy(self.processor.process(clip).arrays["input_features"])
        whole = torch.tensor([[*ids[1:], *text]])
        self.model.set_attn_implementation("eager")
        output = self.model(
            input_features=features, decoder_input_ids=whole, output_attentions=True
        )
        self.model.set_attn_implementation("sdpa")
        layers = self.model.config.decoder_layers
        weights = torch.cat(output.cross_attentions[layers // 2 :], 1)
        weights = weights[..., : round(len(clip) / RATE / 0.02)]
        weights = weights / weights.sum(-1, keepdim=True)
        deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
        smooth = _median_filter((weights - mean) / deviation, 7)
        matrix = smooth.mean(1)[0, len(ids) - 2 :].numpy()
        rows, columns = _dynamic_time_warping(-matrix)
        return [float(columns[rows == row][0] * 0.02) for row in range(len(text) + 1)]

    def language(self, clip: Samples) -> int:
        """The token of the language that transformers hears."""
        features = torch.from_numpy(self.processor.process(clip).arrays["input_features"])
        return int(self.model.detect_language(features)[0])
