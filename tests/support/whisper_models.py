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
        settings = self.model.generation_config
        begin = len(ids) - 1
        rules: list[Any] = [
            SuppressTokensAtBeginLogitsProcessor(settings.begin_suppress_tokens, begin),
            SuppressTokensLogitsProcessor(settings.suppress_tokens),
        ]
        if ids[-1] != settings.no_timestamps_token_id:
            rules.append(WhisperTimeStampLogitsProcessor(settings, begin))
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

    def language(self, clip: Samples) -> int:
        """The token of the language that transformers hears."""
        features = torch.from_numpy(self.processor.process(clip).arrays["input_features"])
        return int(self.model.detect_language(features)[0])
