"""Loads a Whisper model: its encoder as transformers has it, its decoder over pages.

It is admitted by a probe: a prompt behind a clip of drawn states, cut inside it, must give the
logits that transformers' own forward gives.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSpeechSeq2Seq, PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.media.audio_processor import AudioProcessor
from rayfin.actors.media.kinds import SPEECH_MODELS
from rayfin.actors.media.load import load_processor
from rayfin.actors.media.whisper import clip_tokens
from rayfin.actors.model_files.pooling_recipe import PoolingRecipe
from rayfin.actors.runner.cpu.packed_layers import PackedLinear
from rayfin.actors.runner.loading import LoadedModel, cpu_kernels
from rayfin.actors.runner.models.compare import TOLERANCE
from rayfin.actors.runner.models.dtypes import page_type
from rayfin.actors.runner.models.weights import load_model
from rayfin.actors.runner.parts.vision.encoder import MediaEncoder
from rayfin.actors.runner.parts.vision.load import VisionPart
from rayfin.actors.runner.parts.vision.media_slots import MediaSlots
from rayfin.actors.runner.parts.whisper.aligner import Aligner, alignment_heads
from rayfin.actors.runner.parts.whisper.decoder import WhisperDecoder
from rayfin.actors.runner.parts.whisper.probe import Probe
from rayfin.actors.runner.parts.whisper.rules import RuleTokens, TranscriptRules
from rayfin.kernels.attention.select import page_types, select_attention
from rayfin.kernels.cpu.kernels import CpuKernels


class ClipStates:
    """The encoder, whose states fill whole pages: what ``MediaEncoder`` runs for a clip."""

    def __init__(self, model: Any, tokens: int) -> None:
        self._model, self._tokens = model, tokens

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    def get_audio_features(
        self, input_features: torch.Tensor, return_dict: bool = True
    ) -> BaseModelOutputWithPooling:
        """The states [1, tokens, hidden] of mel features [1, mels, frames]; the last are zeros."""
        states = self._model.get_encoder()(input_features).last_hidden_state
        padding = self._tokens - states.shape[1]
        padded = nn.functional.pad(states, (0, 0, 0, padding))
        return BaseModelOutputWithPooling(pooler_output=padded)


def load_whisper(
    args: EngineArgs, config: PretrainedConfig, device: torch.device, recipe: PoolingRecipe | None
) -> LoadedModel | None:
    """Loads the model, and compares it with transformers' forward.

    Returns:
        None if the model is none of this kind.

    Raises:
        InvalidConfig: a file is missing or wrong, or a setting does not go with such a model.
        UnsupportedModel: the logits differ.
    """
    if config.model_type not in SPEECH_MODELS:
        return None
    _check(args, config)
    processor = load_processor(args)
    assert isinstance(processor, AudioProcessor) and processor.transcription.speech is not None
    model: Any = load_model(args, config, device, "sdpa", AutoModelForSpeechSeq2Seq)
    tokens = clip_tokens(config, args.page_size)
    kernels: CpuKernels | None = None
    if device.type == "cpu":
        kernels = cpu_kernels(args, model.num_parameters())
    try:
        kernel = select_attention(device, model.dtype, args.attention, kernels)
    except ValueError as error:
        raise InvalidConfig(str(error), "attention") from None
    decoder = WhisperDecoder(model, kernel, tokens)
    cache_bytes = int(args.mm_encoder_cache_gb * 2**30)
    encoder = MediaEncoder(ClipStates(model, tokens), cache_bytes, "audio")
    speech = processor.transcription.speech.tokens
    probe = Probe(model, speech, tokens)
    if kernels and model.dtype in (torch.float32, torch.bfloat16):
        _pack(model, kernels)
        encoder.threads = kernels.threads
        torch.set_num_threads(1)  # little is left to torch, whose threads would be in the way
    difference = probe.difference(decoder, args.page_size)
    # That of text: it is a decoder alone that is compared, and both sides round.
    if not difference <= TOLERANCE.get(model.dtype, 0.25):
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be served: over pages its logits differ from its own "
            f"forward by {difference:.1e} of the largest one",
            "model",
        )
    rule_tokens = RuleTokens.of(speech, model.generation_config, decoder.vocab_size)
    rules = TranscriptRules(rule_tokens, tokens, config.max_target_positions)
    decoder.rules = rules
    decoder.aligner = Aligner(alignment_heads(model), tokens)
    part = VisionPart(
        *(model, None, processor, encoder, MediaSlots(None), cache_bytes),
        front_tokens=tokens,
        observers=(rules, decoder.aligner),
    )
    return LoadedModel(
        *(device, config, part.around(decoder), None),
        page_type(args.kv_cache_dtype, model.dtype, kernel),
        *(kernels, None),
        page_types=tuple(page_types(kernel)),
        parts=(part,),
        parameters=int(model.num_parameters()),
        position_offset=-tokens,
    )


def _check(args: EngineArgs, config: PretrainedConfig) -> None:
    """Refuses settings that do not go with such a model."""
    name = ", ".join(config.architectures or [type(config).__name__])
    if args.language_model_only:
        raise InvalidConfig(
            f"{name} writes down speech; it is no language model", "language_model_only"
        )
    if args.quantization not in (None, "dequantize"):
        raise InvalidConfig(
            f"quantization {args.quantization!r} is for models of text", "quantization"
        )
    if args.speculation is not None and args.speculation.one_device:
        raise InvalidConfig(f"{name} is served without a draft model or head", "speculative_config")


def _pack(model: Any, kernels: CpuKernels) -> None:
    """Puts the linear layers of the decoder, and the head, on the compiled kernels."""
    owners = [module for module in model.model.decoder.modules()] + [model]
    for owner in owners:
        for name, child in list(owner.named_children()):
            if type(child) is nn.Linear:
                setattr(owner, name, PackedLinear(kernels, child.weight, child.bias, kernels.pack))
