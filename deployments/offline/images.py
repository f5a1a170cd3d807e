"""Images of offline prompts, and prompts in all the forms that ``LLM`` takes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.images.processor import ImageProcessor, put_images
from rayfin.actors.messages import Int32Array
from rayfin.deployments.media.reader import MediaReader
from rayfin.deployments.media.settings import MediaSettings
from rayfin.deployments.requests.prompts import WrittenPrompt, read_prompts
from rayfin.deployments.text.opening import ChatPrompt
from rayfin.deployments.text.tokenizer import Tokenizer

DATA = "multi_modal_data"


class OfflineImages:
    """Puts the images of prompts in place; of a model that reads text only it refuses them."""

    def __init__(self, args: EngineArgs, settings: MediaSettings, *, remote: bool) -> None:
        processor = ImageProcessor.load(args)
        self.media: MediaReader | None = None
        if processor is not None:
            put = None
            if remote:
                import ray

                put = ray.put
            self.media = MediaReader(processor, settings, put)

    def place(
        self, prompts: Sequence[WrittenPrompt], tokens: Sequence[list[int]]
    ) -> tuple[list[WrittenPrompt], list[list[int]]]:
        """Replaces the image tokens of prompts by those of their pictures."""
        placed = [self._place(*each) for each in zip(prompts, tokens, strict=True)]
        return [prompt for prompt, _ in placed], [ids for _, ids in placed]

    def place_chat(self, prompt: ChatPrompt, messages: Any, param: str) -> ChatPrompt:
        """The same for a rendered conversation."""
        images = [] if self.media is None else self.media.read_now(messages, param)
        if self.media is None or not images:
            return prompt
        ids, inputs = put_images(prompt.ids, images, self.media.image_token_id, param)
        return replace(prompt, ids=ids, images=inputs)

    def template(self, tokenizer: Tokenizer | None) -> str | None:
        """The chat template of the processor, where the tokenizer has none."""
        if self.media is None or tokenizer is None or tokenizer.inner.chat_template:
            return None
        return self.media.processor.chat_template

    def shown(self, prompt: Int32Array) -> list[int]:
        """The ids of a prompt as users see them."""
        token = -1 if self.media is None else self.media.image_token_id
        ids: list[int] = np.where(prompt < 0, token, prompt).tolist()
        return ids

    def _place(self, prompt: WrittenPrompt, ids: list[int]) -> tuple[WrittenPrompt, list[int]]:
        if not prompt.pictures:
            return prompt, ids
        param = f"{prompt.param}.{DATA}"
        if self.media is None:
            raise InvalidRequest(
                "Images are not supported: this model reads text only.",
                param,
                "unsupported_content",
            )
        images = self.media.read_pictures(prompt.pictures, f"{param}.image")
        whole, inputs = put_images(ids, images, self.media.image_token_id, param)
        return replace(prompt, images=inputs), whole


def list_prompts(prompts: Any) -> list[WrittenPrompt]:
    """Reads one prompt or several: texts, token ids, arrays, or vLLM's dicts."""
    items = prompts if isinstance(prompts, str | Mapping) else _plain(prompts)
    if items == []:
        return []
    several = not isinstance(items, str | Mapping) and not isinstance(items[0], int)
    each = items if several else [items]
    pictures = [_pictures(item, place) for place, item in enumerate(each)]
    texts = [
        {name: value for name, value in item.items() if name != DATA}
        if isinstance(item, Mapping)
        else item
        for item in each
    ]
    written = read_prompts(texts if several else texts[0], mixed=True)
    return [replace(one, pictures=own) for one, own in zip(written, pictures, strict=True)]


def _pictures(prompt: Any, place: int) -> tuple[Any, ...]:
    data = prompt.get(DATA) if isinstance(prompt, Mapping) else None
    if data is None:
        return ()
    path = f"prompt[{place}].{DATA}"
    if not isinstance(data, Mapping) or not data.keys() <= {"image"}:
        raise InvalidRequest(f"{path} has images only, as 'image'.", path, "unsupported_content")
    images = data.get("image")
    if images is None:
        return ()
    return tuple(images) if isinstance(images, list | tuple) else (images,)


def _plain(items: Any) -> list[Any]:
    """Converts arrays of token ids to lists."""
    listed = items.tolist() if isinstance(items, np.ndarray) else list(items)
    return [item.tolist() if isinstance(item, np.ndarray) else item for item in listed]
