"""Tiny random models that hear, with a processor, a tokenizer and a chat template each."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from rayfin.actors.config import EngineArgs
from rayfin.actors.media.audio_processor import AudioProcessor, Samples
from rayfin.actors.media.part import VIRTUAL_TOKENS
from rayfin.actors.media.processed import put_media
from rayfin.actors.media.virtual_ids import put_virtual_ids
from rayfin.actors.runner.parts.vision.towers import model_class
from rayfin.deployments.text.tokenizer import Tokenizer
from vision_models import EOS, PAD, TEMPLATE, TEXT, make_tokenizer

AUDIO = 3  # the id of the token for a clip
RATE = 16000
MELS = 8
TOWER: dict[str, Any] = {
    "num_mel_bins": MELS,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_source_positions": 50,
    "initializer_range": 0.2,
}
OLD_NAMES = {
    "hidden_size": "d_model",
    "intermediate_size": "encoder_ffn_dim",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
}
QWEN_TOWER = {OLD_NAMES.get(name, name): value for name, value in TOWER.items()}
GLM_TOWER = {name: TOWER[name] for name in TOWER if name != "max_source_positions"} | {
    "intermediate_size": 96,
    "max_position_embeddings": 100,
}

ASR_TOWER = {name: QWEN_TOWER[name] for name in QWEN_TOWER if name != "max_source_positions"} | {
    "output_dim": 32,
    "downsample_hidden_size": 8,
    "n_window_infer": 200,
}

FAMILIES: dict[str, tuple[dict[str, Any], str, str, int]] = {
    # model type: config, class of the processor, token for a clip, seconds of a window
    "qwen2_audio": (
        {
            "audio_config": {"model_type": "qwen2_audio_encoder", **QWEN_TOWER},
            "text_config": {"model_type": "qwen2", **TEXT},
            "audio_token_index": AUDIO,
        },
        "Qwen2AudioProcessor",
        "<|AUDIO|>",
        1,
    ),
    "voxtral": (
        {
            "audio_config": {"model_type": "voxtral_encoder", **TOWER},
            "text_config": {"model_type": "llama", **TEXT},
            "audio_token_id": AUDIO,
        },
        "VoxtralProcessor",
        "[AUDIO]",
        1,
    ),
    "glmasr": (
        {
            "audio_config": {"model_type": "glmasr_encoder", **GLM_TOWER},
            "text_config": {"model_type": "llama", **TEXT},
            "audio_token_id": AUDIO,
            "tie_word_embeddings": False,
        },
        "GlmAsrProcessor",
        "<|pad|>",
        2,
    ),
    "audioflamingo3": (
        {
            "audio_config": {"model_type": "audioflamingo3_encoder", **TOWER},
            "text_config": {"model_type": "qwen2", **TEXT},
            "audio_token_id": AUDIO,
        },
        "AudioFlamingo3Processor",
        "<sound>",
        1,
    ),
    "qwen3_asr": (
        {
            "audio_config": {"model_type": "qwen3_asr_encoder", **ASR_TOWER},
            "text_config": {"model_type": "qwen3", **TEXT},
            "audio_token_id": AUDIO,
            "pad_token_id": PAD,
            "eos_token_id": EOS,
            "tie_word_embeddings": False,
        },
        "Qwen3ASRProcessor",
        "<|audio_pad|>",
        30,
    ),
}
EXTRACTORS = {"qwen3_asr": "Qwen3ASRFeatureExtractor"}
NAMED = {
    "qwen3_asr": {
        "audio_token": "<|audio_pad|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    }
}
"""Tokens that a family's tokenizer has as attributes."""


def make_audio_model(family: str, folder: Path, seed: int = 0) -> Any:
    """Saves a random model of the family with all its files; returns it as transformers runs it."""
    values, processor, token, window = FAMILIES[family]
    config = AutoConfig.for_model(**{"model_type": family, **values})
    torch.manual_seed(seed)
    model = model_class(config, "audio").from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 and "norm" not in name:
                parameter.normal_(0.0, 0.2)
            elif parameter.dim() >= 2 and parameter.std() < 0.1:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    tokenizer = make_tokenizer(token, NAMED.get(family))
    if family != "voxtral":
        template = TEMPLATE.replace("part.type == 'image'", "part.type == 'audio'")
        tokenizer.chat_template = template.replace("PLACE", token)
    tokenizer.save_pretrained(folder)
    extractor = {
        "feature_extractor_type": EXTRACTORS.get(family, "WhisperFeatureExtractor"),
        "processor_class": processor,
        "feature_size": MELS,
        "sampling_rate": RATE,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": window,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    return model.eval()


def tone(seed: int, seconds: float = 0.5, rate: int = RATE) -> Samples:
    """A clip [N] of three drawn tones and noise."""
    drawn = np.random.default_rng(seed)
    t = np.arange(int(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * f * t) for f in drawn.uniform(100, 4000, 3))
    return (0.2 * tones + 0.1 * drawn.standard_normal(len(t))).astype(np.float32)


def wav(clip: Samples, rate: int = RATE, form: str = "WAV", **more: Any) -> bytes:
    """Writes a file of a clip: the same bytes whenever it is written."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, clip, rate, format=form, **more)
    written = bytearray(file.getvalue())
    # libsndfile puts the second of writing into the PEAK chunk of a WAV of floats: its name, size
    # and version are 12 bytes.
    peak = written.find(b"PEAK", 0, 100)
    if form == "WAV" and peak >= 0:
        written[peak + 12 : peak + 16] = bytes(4)
    return bytes(written)


class AudioModel:
    """A tiny model as transformers runs it: what the runner must agree with."""

    def __init__(self, family: str, folder: Path, seed: int = 0) -> None:
        self.family, self.folder = family, folder
        self.model = make_audio_model(family, folder, seed)
        self.processor = AudioProcessor.load(EngineArgs(model=str(folder)))
        self._said: dict[Any, list[int]] = {}  # what was asked -> what transformers said

    def prompt(self, *parts: Sequence[int] | Samples) -> tuple[list[int], Any]:
        """Tokens and clips of a prompt whose parts are token ids and samples."""
        ids: list[int] = []
        clips = []
        for part in parts:
            if isinstance(part, np.ndarray):
                ids.append(self.processor.place_id)
                clips.append(self.processor.process(part))
            else:
                ids += part
        whole, inputs = put_media(ids, clips, AUDIO, "prompt", kind="audio")
        return put_virtual_ids(np.array(whole, np.int32), inputs, AUDIO).tolist(), inputs

    def greedy(self, ids: Sequence[int], clips: Any, max_tokens: int, **more: Any) -> list[int]:
        """What transformers' own ``generate`` says, asked once for the same prompt and clips."""
        heard = [np.asarray(own).tobytes() for clip in clips for own in clip.arrays.values()]
        key = (tuple(ids), tuple(heard), max_tokens, *more.items())
        if key not in self._said:
            self._said[key] = self._generate(ids, clips, max_new_tokens=max_tokens, **more)
        return list(self._said[key])

    def _generate(self, ids: Sequence[int], clips: Any, **settings: Any) -> list[int]:
        plain = torch.tensor([[AUDIO if token < VIRTUAL_TOKENS else token for token in ids]])
        names = clips[0].arrays if clips else ()
        fields = {
            name: torch.from_numpy(np.concatenate(_padded([clip.arrays[name] for clip in clips])))
            for name in names
        }
        output = self.model.generate(
            plain,
            attention_mask=torch.ones_like(plain),
            do_sample=False,
            pad_token_id=PAD,
            **fields,
            **settings,
        )
        tokens: list[int] = output[0, plain.shape[1] :].tolist()
        return tokens


def _padded(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Arrays [..., F] with as many frames as the longest one."""
    most = max(own.shape[-1] for own in arrays)
    return [np.pad(own, [(0, 0)] * (own.ndim - 1) + [(0, most - own.shape[-1])]) for own in arrays]


def text_of(tokenizer: Tokenizer, tokens: Sequence[int], most: int) -> str:
    """The text of an answer of at most so many tokens; one that is cut has no half a character."""
    detokenizer = tokenizer.detokenizer()
    text = detokenizer.push(tokens)
    tail = detokenizer.finish()
    return text + (tail.rstrip("\ufffd") if len(tokens) == most else tail)
