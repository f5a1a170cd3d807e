"""Loads a model that reads images, or hears: its language model over pages, its tower as it is.

A model is admitted by a probe, not by its name: one image or clip, cut by chunks, must give the
logits that the model's own forward gives.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PretrainedConfig

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import UnsupportedModel
from rayfin.actors.media.audio_processor import AudioProcessor, Samples
from rayfin.actors.media.image_processor import GRID
from rayfin.actors.media.kinds import MediaKind, media_kind, served_media
from rayfin.actors.media.load import load_processor
from rayfin.actors.media.part import MediaFacts, MediaInput
from rayfin.actors.media.processed import WORDS, MediaProcessor, ProcessedMedia, put_media
from rayfin.actors.media.virtual_ids import put_virtual_ids
from rayfin.actors.messages import BoolArray, Int32Array, NewRequest, Sampling
from rayfin.actors.model_files.pooling_recipe import PoolingRecipe
from rayfin.actors.runner.batch import SHIFTS, RowInput
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.models.mapped_weights import keep_narrow
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel, set_attention
from rayfin.actors.runner.models.replace import chunked_logits
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.models.weights import load_model
from rayfin.actors.runner.observers import StepObserver
from rayfin.actors.runner.parts.model_part import Decoder, ModelPart, Weights
from rayfin.actors.runner.parts.vision.encoder import MediaEncoder
from rayfin.actors.runner.parts.vision.media_slots import MediaSlots, ModelRope
from rayfin.actors.runner.parts.vision.text_view import TextView
from rayfin.actors.runner.parts.vision.towers import model_class, tensors
from rayfin.actors.runner.parts.vision.vision_model import VisionModel
from rayfin.actors.settings.bidirectional import Bidirectional
from rayfin.actors.settings.choices import SeesAhead

PROBE_SIZE = (70, 50)
PROBE_CLIP = 0.4  # seconds
PROBE_SLOT = 0
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference of logits, as a share of the largest one."""

TYPES = "token_type_ids"
"""Of a forward by which images see themselves both ways."""

ROUNDED = 0.5
"""The same where weights have fewer bits: a wrong place of an image differs more."""


class VisionPart(ModelPart):
    """What a model that reads images, or hears, has beside its language model.

    Args:
        model: transformers' whole model, as long as it is compared.
        encoder: keeps embeddings of so many ``cache_bytes``.
        front_tokens: of the clip in front of each prompt, of a model that writes down speech.
        observers: more of them.
    """

    facts: MediaFacts
    sees_ahead = True

    def __init__(
        self,
        model: Any,
        text: TextView | None,
        processor: MediaProcessor,
        encoder: MediaEncoder,
        slots: MediaSlots,
        cache_bytes: int,
        *,
        front_tokens: int = 0,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self.model, self.text = model, text
        self.processor, self.encoder, self.slots = processor, encoder, slots
        self.observers = (slots, encoder, *observers)
        self.row_inputs = (RowInput(SHIFTS, 0, slots.shifts),)
        self.facts = MediaFacts(
            token_id=processor.media_token_id, num_bytes=cache_bytes, front_tokens=front_tokens
        )

    def alters(self, slots: Int32Array) -> BoolArray | None:
        return self.slots.alters(slots)

    def wrap(self, model: StepModel, decoder: Decoder) -> VisionModel:
        if decoder.paged.recurrent is not None:
            name, words = type(self.model).__name__, WORDS[self.processor.kind][1]
            raise UnsupportedModel(
                f"{name} cannot be served with {words}: its layers keep states "
                "(language_model_only serves its text)",
                "model",
            )
        if decoder.kernels:
            self.encoder.threads = decoder.kernels.threads
        require_equal_media(self, decoder.paged, model, rounded=decoder.rounded)
        return self.around(model)

    def around(self, text: StepModel) -> VisionModel:
        """The model whose language model is ``text``."""
        return VisionModel(text, self.encoder, self.slots, self.processor.media_token_id)

    def release(self) -> None:
        """Frees the language model's modules; the tower stays."""
        decoder = self.model.get_decoder()
        for owner in list(self.model.modules()):
            for name, child in list(owner.named_children()):
                if child is decoder:
                    setattr(owner, name, torch.nn.Identity())
        self.model = self.text = None


def read_media(
    args: EngineArgs, config: PretrainedConfig, device: torch.device, recipe: PoolingRecipe | None
) -> Weights | None:
    """Reads the language model, and the tower unless the text is to be served alone.

    Returns:
        None if the model reads text only. ``VisionPart.wrap`` compares it.

    Raises:
        InvalidConfig: a file is missing or wrong.
        UnsupportedModel: the model has no decoder apart from its tower.
    """
    if served_media(args, config) is None:
        return None
    text, part = _read(args, config, device)
    if part is None:
        return Weights(text, text, compared=False)
    return Weights(text, part.model, (part,), compared=False)


def _read(
    args: EngineArgs, config: PretrainedConfig, device: torch.device
) -> tuple[TextView, VisionPart | None]:
    if getattr(config, "has_lora_adapter", False):
        name = ", ".join(config.architectures or [type(config).__name__])
        why = "its checkpoint has an adapter for audio, which is not applied"
        raise UnsupportedModel(f"{name} cannot be served: {why}", "model")
    kind = media_kind(config) or "image"
    processor = load_processor(args)
    maker, attention = model_class(config, kind), _attention(config, kind)
    whole = load_model(args, config, device, attention, maker, narrow=True)
    text = TextView(whole)
    set_attention(text, ATTENTION)  # type: ignore[arg-type]
    if processor is None:
        return text, None
    keep_narrow(whole, but=text)
    for module in text.modules():  # the comparison shows which later tokens a token sees
        if getattr(module, "is_causal", True) is False:
            module.is_causal = True  # type: ignore[assignment]
    base: Any = getattr(whole, "model", whole)
    rope = None
    if kind == "image" and hasattr(base, "get_rope_index"):
        rope = ModelRope(base, processor.media_token_id)
    cache_bytes = int(args.mm_encoder_cache_gb * 2**30)
    encoder = MediaEncoder(base, cache_bytes, kind)
    return text, VisionPart(whole, text, processor, encoder, MediaSlots(rope), cache_bytes)


def _attention(config: PretrainedConfig, kind: MediaKind) -> dict[str, str]:
    """The attention of each part: over pages in the language model."""
    towers = ("vision_config",) if kind == "image" else tuple(config.sub_configs)
    return {**dict.fromkeys((*towers, ""), "sdpa"), "text_config": ATTENTION}


def require_equal_media(
    parts: VisionPart, paged: PagedModel, text: StepModel, *, rounded: bool = False
) -> None:
    """Compares a prompt with an image or clip, cut inside it, with the model's own forward.

    Then the language model's modules are freed, unless ``text`` runs some steps on them.

    Args:
        rounded: ``text`` has weights of fewer bits.

    Raises:
        UnsupportedModel: the logits differ.
    """
    name, processor = type(parts.model).__name__, parts.processor
    media = processor.process(_probe(processor))
    token, place = processor.media_token_id, processor.place_id
    ids, images = put_media([5, 6, place, 7, 8, 9], [media], token, "model", place)
    expected = _own_logits(parts, torch.tensor(ids, device=paged.device), media)
    virtual = put_virtual_ids(np.array(ids, np.int32), images, token)
    limit = ROUNDED if rounded else TOLERANCE.get(paged.dtype, 0.1)
    differences: list[float] = []
    for ahead in _sights(parts.model):
        parts.slots.ahead = ahead
        logits = _paged_logits(parts, paged, text, virtual, images)
        largest = expected.abs().max().clamp(min=1e-6)
        differences.append(float((logits - expected).abs().max() / largest))
        if differences[-1] <= limit:
            break
    else:
        raise UnsupportedModel(
            f"{name} cannot be served with {WORDS[processor.kind][1]}: over pages its logits "
            f"differ from its own forward by {min(differences):.1e} of the largest one "
            "(language_model_only serves its text)",
            "model",
        )
    if ahead != "nothing":
        parts.facts = replace(parts.facts, uncut=Bidirectional(ahead, images[0].length))
    if isinstance(text, CpuDecoder):
        parts.release()


def _sights(model: Any) -> list[SeesAhead]:
    """Which later tokens those of a prompt may see, the most usual first."""
    both_ways = TYPES in inspect.signature(model.forward).parameters
    return ["nothing", "image", "prompt"] if both_ways else ["nothing"]


def _probe(processor: MediaProcessor) -> Any:
    return probe_clip(processor) if isinstance(processor, AudioProcessor) else probe_image()


def probe_clip(processor: AudioProcessor) -> Samples:
    """A short rising tone."""
    t = np.arange(int(PROBE_CLIP * processor.rate), dtype=np.float32) / processor.rate
    return (0.5 * np.sin(2 * np.pi * (300 + 2000 * t) * t)).astype(np.float32)


def probe_image() -> Image.Image:
    """A small image in which no two places are alike."""
    width, height = PROBE_SIZE
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    colors = np.stack([3 * x, 5 * y, (7 * x + 11 * y) % 256], axis=-1)
    return Image.fromarray((colors % 256).astype(np.uint8), "RGB")


@torch.inference_mode()
def _own_logits(parts: VisionPart, ids: torch.Tensor, media: ProcessedMedia) -> torch.Tensor:
    """Logits [T, V] of transformers' forward of the whole model."""
    fields = tensors(media.arrays, ids.device, parts.model.dtype)
    if GRID in fields:
        types = (ids == parts.processor.media_token_id).to(torch.int32)
        fields["mm_token_type_ids"] = types.unsqueeze(0)
    if TYPES in inspect.signature(parts.model.forward).parameters:
        is_image = (ids == parts.processor.media_token_id) & parts.processor.types_of_images
        fields[TYPES] = is_image.to(torch.int64).unsqueeze(0)
    set_attention(parts.text, "eager")  # type: ignore[arg-type]
    try:
        output = parts.model(input_ids=ids.unsqueeze(0), use_cache=False, **fields)
    finally:
        set_attention(parts.text, ATTENTION)  # type: ignore[arg-type]
    logits: torch.Tensor = output.logits[0].float()
    return logits


def _paged_logits(
    parts: VisionPart,
    paged: PagedModel,
    text: StepModel,
    ids: np.ndarray,
    images: tuple[MediaInput, ...],
) -> torch.Tensor:
    request = NewRequest(
        PROBE_SLOT, Sampling(), len(ids), history=ids, prompt_len=len(ids), parts=images
    )
    parts.slots.enter(request)
    middle = images[0].start + images[0].length // 2
    cuts = {0, 1, middle, len(ids) - 1, len(ids)}
    image_spans = [(images[0].start, images[0].start + images[0].length)]
    for first, last in Bidirectional(parts.slots.ahead).spans(image_spans, len(ids)):
        cuts = {cut for cut in cuts if not first < cut < last}
    tokens = torch.from_numpy(ids.astype(np.int64)).to(paged.device)
    try:
        model = parts.around(text)
        return chunked_logits(model, paged, tokens, sorted(cuts), slot=PROBE_SLOT)
    finally:
        parts.slots.close()
        parts.encoder.clear()
