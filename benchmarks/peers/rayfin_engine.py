"""Rayfin itself, in one process."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from peer import serve

import rayfin
from rayfin.actors.adapters.files import read_folder
from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.config import EngineArgs, resolve
from rayfin.actors.media.load import load_processor
from rayfin.actors.media.part import MediaInput
from rayfin.actors.media.virtual_ids import put_virtual_ids
from rayfin.actors.messages import EngineRequest, Int32Array, Sampling, StopRules
from rayfin.actors.model_files.gguf_folder import gguf_folder
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.scheduler.engine import Engine
from rayfin.deployments.media.parts import MediaPart
from rayfin.deployments.media.reader import MediaReader


class Pictures:
    """Puts the files of a folder into prompts: id -1 - N stands for N.png.

    Args:
        place: tokens of a prompt for an image.
    """

    def __init__(self, args: EngineArgs, folder: Path, place: list[int]) -> None:
        processor = load_processor(args)
        assert processor is not None, "the model reads text only"
        self._reader = MediaReader(processor)
        self._folder, self._place = folder, place

    def placed(self, prompt: list[int]) -> tuple[Int32Array, tuple[MediaInput, ...]]:
        """The prompt with the tokens of its images, and those."""
        names = [f"{-1 - token}.png" for token in prompt if token < 0]
        parts = [MediaPart(name, data=(self._folder / name).read_bytes()) for name in names]
        ids = [token_id for token in prompt for token_id in (self._place if token < 0 else [token])]
        images = [self._reader.process(part) for part in parts]
        whole, inputs = self._reader.place(ids, images, "prompt")
        token_id = self._reader.media_token_id
        return put_virtual_ids(np.array(whole, np.int32), inputs, token_id), inputs


class Rayfin:
    """An Engine over an inline runner. With the setting ``adapters``, a folder of folders, requests
    take those in turn; with ``images``, a folder of pictures, negative ids of prompts are those.
    With ``gguf`` (gguf_model.py) the model is served from such a file beside its folder, which the
    peer of llama.cpp reads too."""

    version = f"rayfin {rayfin.__version__}"

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        folder = settings.pop("adapters", None)
        paths = sorted(map(str, Path(folder).iterdir())) if folder else []
        self._adapters = [AdapterRef(read_folder(path).digest, path, path) for path in paths]
        if (precision := settings.pop("gguf", None)) is not None:
            from gguf_model import converted  # its package is not installed everywhere

            model = str(gguf_folder(str(converted(Path(model), precision))))
        pictures, place = settings.pop("images", None), settings.pop("image_place", [])
        # Other engines draft only where they are asked to, and random weights repeat themselves.
        if "speculative_config" not in settings:
            settings.setdefault("spec_method", "none")
        args = EngineArgs.from_dict({"model": model, "max_lease": 1, **settings})
        self._pictures = Pictures(args, Path(pictures), place) if pictures else None
        runner = ModelRunner(args)
        config = resolve(args, *runner.profile())
        self._engine = Engine(config, InlineExecutor(runner, config))

    def add(self, index: int, prompt: list[int], output_tokens: int) -> None:
        ids, images = np.array(prompt, np.int32), ()
        if self._pictures is not None:
            ids, images = self._pictures.placed(prompt)
        rules = StopRules(output_tokens)
        request = EngineRequest(str(index), ids, Sampling(), rules, key=index, parts=images)
        if self._adapters:
            request.use(self._adapters[index % len(self._adapters)])
        self._engine.add(request)

    def step(self) -> Iterable[tuple[int, int]]:
        for deltas in self._engine.step().values():
            for ended in deltas.ended:
                if ended.error is not None:
                    raise ended.error
            yield from ((key, 1) for key in deltas.keys.tolist())


if __name__ == "__main__":
    serve(Rayfin)
