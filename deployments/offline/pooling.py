"""Offline pooling: inputs to vectors, in vLLM's classes of outputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import EngineRequest, Float32Array
from rayfin.actors.model_files.pooling_recipe import PoolingRecipe, PoolingTask
from rayfin.deployments.generation.prompt_forms import Side, WrittenPrompt
from rayfin.deployments.offline.arguments import UseTqdm, progress
from rayfin.deployments.offline.engines import OfflineEngine
from rayfin.deployments.pooling.inputs import (
    Cut,
    PoolingInput,
    build_pooling,
    instruction,
    text_input,
)
from rayfin.deployments.pooling.pairs import PairSettings, make_pairs, prepare_pairs
from rayfin.deployments.pooling.vectors import activated, check_dimensions, cut
from rayfin.deployments.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What ``LLM.embed``, ``encode``, ``classify`` and ``score`` do with the model's vectors."""

    dimensions: int | None = None  # of an embedding; the model must be trained for it
    use_activation: bool | None = None  # False: raw scores and classes
    truncate_prompt_tokens: int | None = None  # -1: cut to the context
    truncation_side: Side = "right"
    prompt_name: str | None = None  # one of the model's prompts; None: its default one

    def clone(self) -> "PoolingParams":
        """Returns a copy."""
        return replace(self)


@dataclass(slots=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probabilities of the labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """The score of a pair."""

    score: float


@dataclass(slots=True)
class PoolingOutput:
    """What the model pools: [D] for an input, or [tokens, D] of a task for each token."""

    data: Float32Array


@dataclass(slots=True)
class PooledRequest:
    """One input and its output."""

    request_id: str
    outputs: EmbeddingOutput | ClassificationOutput | ScoringOutput | PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


class OfflinePooling:
    """Runs inputs of a pooling model in one batch."""

    def __init__(
        self,
        engine: OfflineEngine,
        recipe: PoolingRecipe | None,
        tokenizer: Callable[[], Tokenizer],
        model: str,
    ) -> None:
        self._engine = engine
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._model = model
        self._requests = 0

    def recipe(self, kind: str = "") -> PoolingRecipe:
        """The model's recipe.

        Raises:
            InvalidRequest: it generates, or does not do ``kind``.
        """
        if self._recipe is None:
            raise InvalidRequest(
                "this model generates: load it with convert='embed' to pool it", "model"
            )
        if kind and self._recipe.kind != kind:
            raise InvalidRequest(f"this model is for {self._recipe.kind}, not {kind}", "model")
        return self._recipe

    def inputs(
        self, prompts: Sequence[WrittenPrompt], params: PoolingParams
    ) -> tuple[list[PoolingInput], list[str]]:
        """The inputs' tokens, and their paths for errors."""
        context = self._engine.info.max_model_len
        inputs = pooling_inputs(self._tokenizer, self.recipe(), context, prompts, params)
        return inputs, [prompt.param for prompt in prompts]

    def run(
        self,
        inputs: Sequence[PoolingInput],
        params: Sequence[str],
        *,
        task: PoolingTask | None = None,
        use_tqdm: UseTqdm = True,
    ) -> tuple[list[EngineRequest], list[Float32Array]]:
        """The requests and their vectors, in the order of the inputs.

        Raises:
            RayfinError: the first failure.
        """
        recipe = self.recipe()
        requests = build_pooling(
            inputs,
            [recipe.pooling(task, prompt.skip, prompt.second) for prompt in inputs],
            self._engine.info,
            request_id=str(self._requests),
            params=params,
        )
        self._requests += 1
        vectors: dict[int, Float32Array] = {}
        with progress(use_tqdm, len(requests), "Pooled prompts") as bar:
            for message in self._engine.run(requests):
                for ended in message.ended:
                    if ended.error is not None:
                        raise ended.error
                    assert ended.vector is not None, "a pooled request ended without a vector"
                    vectors[ended.key] = ended.vector
                    bar.update()
        return requests, [vectors[request.key] for request in requests]

    def embed(
        self, prompts: Sequence[WrittenPrompt], params: PoolingParams, use_tqdm: UseTqdm
    ) -> list[PooledRequest]:
        """An embedding of each input."""
        recipe = self.recipe("embed")
        check_dimensions(recipe, params.dimensions, self._model)
        if params.use_activation not in (None, recipe.normalize):
            raise InvalidRequest(
                "use_activation of embeddings is the model's. Near it is "
                "LLM(pooler_config={'use_activation': ...}).",
                "use_activation",
                "unsupported_parameter",
            )
        inputs, paths = self.inputs(prompts, params)
        requests, vectors = self.run(inputs, paths, use_tqdm=use_tqdm)
        dimensions = params.dimensions or recipe.cut
        parts = [cut(vector, dimensions, normalize=recipe.normalize) for vector in vectors]
        return _outputs(requests, [EmbeddingOutput(part.tolist()) for part in parts])

    def classify(
        self, prompts: Sequence[WrittenPrompt], params: PoolingParams, use_tqdm: UseTqdm
    ) -> list[PooledRequest]:
        """The labels' probabilities of each input."""
        recipe = self.recipe("classify")
        inputs, paths = self.inputs(prompts, params)
        requests, vectors = self.run(inputs, paths, use_tqdm=use_tqdm)
        activation = "identity" if params.use_activation is False else recipe.class_activation
        probs = [activated(vector, activation) for vector in vectors]
        return _outputs(requests, [ClassificationOutput(row.tolist()) for row in probs])

    def encode(
        self,
        prompts: Sequence[WrittenPrompt],
        params: PoolingParams,
        task: PoolingTask | None,
        use_tqdm: UseTqdm,
    ) -> list[PooledRequest]:
        """What the model pools of each input, as arrays."""
        inputs, paths = self.inputs(prompts, params)
        requests, vectors = self.run(inputs, paths, task=task, use_tqdm=use_tqdm)
        return _outputs(requests, [PoolingOutput(np.asarray(vector)) for vector in vectors])

    def score(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        params: PoolingParams,
        use_tqdm: UseTqdm,
    ) -> list[PooledRequest]:
        """A score of each pair; the prompts' ids are those of cross-encoders."""
        recipe, context = self.recipe(), self._engine.info.max_model_len
        firsts, seconds = (
            [texts] if isinstance(texts, str) else list(texts) for texts in (first, second)
        )
        limit = Cut(params.truncate_prompt_tokens, params.truncation_side).limit(context)
        scored = prepare_pairs(
            self._tokenizer(),
            recipe,
            make_pairs(firsts, seconds, "text_1", "text_2"),
            PairSettings(limit, raw=params.use_activation is False),
        )
        requests, vectors = self.run(scored.inputs, scored.paths, use_tqdm=use_tqdm)
        whole = recipe.kind == "classify"
        return [
            PooledRequest(
                str(place),
                ScoringOutput(score),
                requests[place].prompt.tolist() if whole else [],
            )
            for place, score in enumerate(scored.scores(vectors))
        ]


def pooling_inputs(
    tokenizer: Callable[[], Tokenizer],
    recipe: PoolingRecipe,
    context: int,
    prompts: Sequence[WrittenPrompt],
    params: PoolingParams,
) -> list[PoolingInput]:
    """Returns the tokens of each prompt; at most ``context`` of them, if ``params`` cut."""
    limit = Cut(params.truncate_prompt_tokens, params.truncation_side).limit(context)
    prefix = instruction(recipe, params.prompt_name)
    inputs = []
    for prompt in prompts:
        if prompt.text is None:
            ids = list(prompt.ids or ())
            if limit is not None:
                ids = ids[:limit] if params.truncation_side == "right" else ids[-limit:]
            inputs.append(PoolingInput(ids))
        else:
            inputs.append(
                text_input(
                    *(tokenizer(), recipe, prompt.text),
                    prefix=prefix,
                    limit=limit,
                    side=params.truncation_side,
                )
            )
    return inputs


def _outputs(
    requests: Sequence[EngineRequest],
    outputs: Sequence[EmbeddingOutput | ClassificationOutput | ScoringOutput | PoolingOutput],
) -> list[PooledRequest]:
    return [
        PooledRequest(request.request_id, output, request.prompt.tolist())
        for request, output in zip(requests, outputs, strict=True)
    ]


def cut_to(params: Any, tokens: int | None = None) -> Any:
    """One or several ``PoolingParams``, None for the default ones; they cut to ``tokens``."""
    if isinstance(params, Sequence):
        return [cut_to(one, tokens) for one in params]
    params = params or PoolingParams()
    return params if tokens is None else replace(params, truncate_prompt_tokens=tokens)


def in_groups(
    prompts: Sequence[WrittenPrompt],
    params: PoolingParams | Sequence[PoolingParams],
    run: Callable[[Sequence[WrittenPrompt], PoolingParams], list[PooledRequest]],
) -> list[PooledRequest]:
    """Runs prompts, a batch for each of the different settings; outputs are in their order.

    Raises:
        InvalidRequest: the numbers differ.
    """
    if isinstance(params, PoolingParams):
        return run(prompts, params)
    if len(params) != len(prompts):
        message = f"{len(prompts)} prompts and {len(params)} pooling_params"
        raise InvalidRequest(message, "pooling_params")
    pooled: dict[int, PooledRequest] = {}
    for setting in dict.fromkeys(params):
        places = [place for place, one in enumerate(params) if one == setting]
        outputs = run([prompts[place] for place in places], setting)
        pooled |= dict(zip(places, outputs, strict=True))
    return [pooled[place] for place in range(len(prompts))]
