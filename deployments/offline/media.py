"""Media and embeddings of offline prompts, and prompts in all the forms that ``LLM`` takes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.media.kinds import MediaKind
from rayfin.actors.media.load import load_processor
from rayfin.actors.media.part import PromptEmbeds
from rayfin.actors.media.processed import WORDS
from rayfin.actors.messages import EngineInfo, Int32Array
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.generation.prompt_forms import (
    IDS,
    SALT,
    TEXT,
    WrittenPrompt,
    prompt_ids,
    read_prompts,
    truncated,
)
from rayfin.deployments.media.embeds_parts import place_embeds, read_parts_now
from rayfin.deployments.media.embeds_tensor import DTYPES, FIELD, Tensor, refused
from rayfin.deployments.media.read_embeds import EmbedsReader, required
from rayfin.deployments.media.reader import MediaReader
from rayfin.deployments.media.settings import MediaSettings
from rayfin.deployments.text.generation_prompt import ChatPrompt
from rayfin.deployments.text.markers import Marked
from rayfin.deployments.text.messages import READS, has_parts
from rayfin.deployments.text.tokenizer import Tokenizer

DATA = "multi_modal_data"
UUIDS = "multi_modal_uuids"  # of vLLM, without effect: digests of media name them
ENCODER, DECODER = "encoder_prompt", "decoder_prompt"
BATCH = 4  # dimensions of an array that holds several images


class OfflineMedia:
    """Puts images or clips of prompts in place; those that a model does not read are refused."""

    def __init__(self, media: MediaReader | None, embeds: EmbedsReader | None) -> None:
        self.media = media
        self._embeds = embeds

    @classmethod
    def load(cls, args: EngineArgs, settings: MediaSettings, *, remote: bool) -> "OfflineMedia":
        """Loads the model's processor, if it has one."""
        processor = load_processor(args)
        put = None
        if remote:
            import ray

            put = ray.put
        embeds = EmbedsReader(put) if args.enable_prompt_embeds else None
        media = None if processor is None else MediaReader(processor, settings, put)
        return cls(media, embeds)

    def tokens(
        self,
        prompt: WrittenPrompt,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        special: bool = True,
    ) -> list[int]:
        """The ids of a prompt; see ``prompt_ids``.

        A text for Whisper has its control tokens itself: around it there would be others, an end of
        text among them.
        """
        speech = None if self.media is None else self.media.speech
        special = special and speech is None
        return prompt_ids(prompt, tokenizer, max_model_len, add_special_tokens=special)

    def place(
        self, prompts: Sequence[WrittenPrompt], tokens: Sequence[list[int]]
    ) -> tuple[list[WrittenPrompt], list[list[int]]]:
        """Replaces the places of images or clips in prompts by their tokens."""
        placed = [self._place(*each) for each in zip(prompts, tokens, strict=True)]
        return [prompt for prompt, _ in placed], [ids for _, ids in placed]

    def chat(
        self, render: Callable[..., ChatPrompt], messages: Any, info: EngineInfo
    ) -> ChatPrompt:
        """A conversation as a prompt, with its media and embeddings in their places.

        Args:
            render: ``render_prompt`` without the messages, and without what they have.
        """
        reads = None if self.media is None else self.media.kind
        if has_parts(messages, FIELD):
            marked = Marked(messages, FIELD)
            rows = read_parts_now(marked, self._embeds, info, tensor_of)
            prompt = render(marked.messages, media=reads, marked=marked)
            ids, placed = place_embeds(prompt.ids, rows)
            return replace(prompt, ids=ids, embeds=placed)
        prompt = render(messages, media=reads)
        media = [] if self.media is None else self.media.read_now(messages, "messages")
        if self.media is None or not media:
            return prompt
        ids, inputs = self.media.place(prompt.ids, media, "messages")
        return replace(prompt, ids=ids, images=inputs)

    def embeds(
        self, prompt: WrittenPrompt, info: EngineInfo, params: SamplingParams
    ) -> tuple[PromptEmbeds, ...]:
        """The embeddings in place of tokens of the prompt.

        Raises:
            InvalidRequest: the engine takes none, or not these.
        """
        if prompt.tensor is None:
            return prompt.embeds
        param = f"{prompt.param}.{FIELD}"

        def cut(places: list[int]) -> list[int]:
            return truncated(places, params, info.max_model_len)

        return (required(self._embeds, info, param).take(prompt.tensor, param, info, cut),)

    def template(self, tokenizer: Tokenizer | None) -> str | None:
        """The chat template of the processor, where the tokenizer has none."""
        if self.media is None or tokenizer is None or tokenizer.inner.chat_template:
            return None
        return self.media.processor.chat_template

    def shown(self, prompt: Int32Array) -> list[int]:
        """The ids of a prompt as users see them; embeddings are -1 in them."""
        token = -1 if self.media is None else self.media.media_token_id
        ids: list[int] = np.where(prompt < 0, token, prompt).tolist()
        return ids

    def _place(self, prompt: WrittenPrompt, ids: list[int]) -> tuple[WrittenPrompt, list[int]]:
        if not prompt.given:
            return prompt, ids
        param = f"{prompt.param}.{DATA}"
        if self.media is None or self.media.kind != prompt.kind:
            words = WORDS[prompt.kind][1].capitalize()
            reads = None if self.media is None else self.media.kind
            raise InvalidRequest(
                f"{words} are not supported: this model reads {READS[reads]} only.",
                param,
                "unsupported_content",
            )
        media = self.media.read_given(prompt.given, f"{param}.{prompt.kind}")
        if (speech := self.media.speech) is not None and speech.tokens.place not in ids:
            ids = [speech.tokens.place, *(ids or [speech.tokens.start])]
        whole, inputs = self.media.place(ids, media, param)
        return replace(prompt, images=inputs), whole


def list_prompts(prompts: Any, *, embeds: bool = False) -> list[WrittenPrompt]:
    """Reads one prompt or several: texts, token ids, arrays, or vLLM's dicts.

    Args:
        embeds: a dict may have ``prompt_embeds``.
    """
    items = prompts if isinstance(prompts, str | Mapping) else plain(prompts)
    if items == []:
        return []
    several = not isinstance(items, str | Mapping) and not isinstance(items[0], int)
    each = [_joined(item, at) for at, item in enumerate(items if several else [items])]
    media = [_media(item, place) for place, item in enumerate(each)]
    tensors = [_tensor(item, place) if embeds else None for place, item in enumerate(each)]
    empty = [bool(given) and _empty(item) for item, (_, given) in zip(each, media, strict=True)]
    texts = [_text_side(*parts) for parts in zip(each, tensors, empty, strict=True)]
    written = read_prompts(texts if several else texts[0], mixed=True)
    placed = [
        replace(one, given=given, kind=kind, tensor=tensor)
        for one, (kind, given), tensor in zip(written, media, tensors, strict=True)
    ]
    return [
        replace(one, ids=[]) if alone else one for one, alone in zip(placed, empty, strict=True)
    ]


def list_texts(prompts: Any) -> list[WrittenPrompt]:
    """Reads prompts as `list_prompts` does, for methods that take no media.

    Raises:
        InvalidRequest: a prompt has some.
    """
    listed = list_prompts(prompts)
    for place, prompt in enumerate(listed):
        if prompt.given:
            path = f"prompt[{place}].{DATA}"
            message = f"{path}: only generate and chat support {WORDS[prompt.kind][1]}."
            raise InvalidRequest(message, path, "unsupported_content")
    return listed


def _joined(item: Any, at: int) -> Any:
    """vLLM's form of a prompt for Whisper in two parts, as one.

    Raises:
        InvalidRequest: a part is missing, or the encoder's has more than clips.
    """
    if not isinstance(item, Mapping) or ENCODER not in item:
        return item
    encoder, decoder = item[ENCODER], item.get(DECODER)
    data = encoder.get(DATA) if isinstance(encoder, Mapping) else None
    beside = isinstance(encoder, Mapping) and (encoder.get(TEXT) or encoder.get(IDS))
    if item.keys() != {ENCODER, DECODER} or data is None or beside:
        path = f"prompt[{at}].{ENCODER}"
        message = f"{path} has {DATA} and no text; {DECODER} stands beside it."
        raise InvalidRequest(message, path, "invalid_type")
    if isinstance(decoder, Mapping):
        return {**decoder, DATA: data}
    return {TEXT if isinstance(decoder, str) else IDS: decoder or [], DATA: data}


def _empty(item: Mapping[str, Any]) -> bool:
    """Whether a prompt with media has nothing beside them, as one of Whisper's may."""
    written = item.get(IDS)
    if written is None:
        written = item.get(TEXT)
    return isinstance(written, str | list | tuple) and not written


def _text_side(item: Any, tensor: Tensor | None, empty: bool) -> Any:
    """A prompt without its media and embeddings, for which ids of 0 stand, as they do for none."""
    if not isinstance(item, Mapping):
        return item
    if empty:
        return {IDS: [0], SALT: item.get(SALT)}
    if tensor is None:
        return {name: value for name, value in item.items() if name not in (DATA, UUIDS)}
    shape = tensor.array.shape
    count = shape[-2] if len(shape) > 1 else 0
    return {IDS: [0] * max(count, 1), SALT: item.get(SALT)}


def _tensor(prompt: Any, place: int) -> Tensor | None:
    """The embeddings of a prompt, of torch's or numpy's."""
    value = prompt.get(FIELD) if isinstance(prompt, Mapping) else None
    if value is None:
        return None
    try:
        return tensor_of(value)
    except InvalidRequest as error:
        path = f"prompt[{place}].{FIELD}"
        raise InvalidRequest(error.message.replace(FIELD, path, 1), path, error.code) from None


def tensor_of(value: Any) -> Tensor:
    """A tensor of torch's or an array of numpy's, on the host.

    Raises:
        InvalidRequest: it is something else, not dense, or not of floating-point numbers.
    """
    name = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
    if not isinstance(value, np.ndarray):
        import torch

        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise refused("it must be a dense tensor of torch's, or an array")
        if name in DTYPES:
            value = value.detach().cpu()
            value = value.contiguous().view(torch.uint16) if name == "bfloat16" else value
            value = value.numpy()
    if name not in DTYPES:
        raise refused(f"{name} is not of {', '.join(DTYPES)}")
    return Tensor(value, name)


def _media(prompt: Any, place: int) -> tuple[MediaKind, tuple[Any, ...]]:
    """The images or clips of a prompt: one, or a list."""
    data = prompt.get(DATA) if isinstance(prompt, Mapping) else None
    if data is None:
        return "image", ()
    path = f"prompt[{place}].{DATA}"
    if not isinstance(data, Mapping) or data.keys() not in ({"image"}, {"audio"}, set()):
        raise InvalidRequest(
            f"{path} has images as 'image', or clips as 'audio'.", path, "unsupported_content"
        )
    if (clips := data.get("audio")) is not None:
        return "audio", _clips(clips)
    images = data.get("image")
    if images is None:
        return "image", ()
    several = isinstance(images, list | tuple) or getattr(images, "ndim", 0) == BATCH
    return "image", tuple(images) if several else (images,)


def _clips(given: Any) -> tuple[Any, ...]:
    """A list of clips, or one: samples, or a pair of them and their rate."""
    if isinstance(given, list) and not (given and isinstance(given[0], int | float)):
        return tuple(given)
    return (given,)


def plain(items: Any) -> list[Any]:
    """Converts arrays of token ids to lists."""
    listed = items.tolist() if isinstance(items, np.ndarray) else list(items)
    return [item.tolist() if isinstance(item, np.ndarray) else item for item in listed]
