"""Scores of pairs of texts: by a cross-encoder, a reranker's template, or two embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import Float32Array
from rayfin.actors.model_files.pooling_recipe import PoolingRecipe
from rayfin.deployments.pooling.inputs import PoolingInput, instruction, pair_input, text_input
from rayfin.deployments.pooling.vectors import activated, similarity
from rayfin.deployments.text.tokenizer import Tokenizer

# Qwen3-Reranker's published form.
RERANK_SYSTEM = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
RERANK_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
RERANK_TASK = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts, and their paths for errors."""

    first: str
    second: str
    first_path: str
    second_path: str


@dataclass(frozen=True, slots=True)
class PairSettings:
    """How pairs are cut and scored."""

    limit: int | None = None  # tokens of an input; None: a longer one is refused
    first_tokens: int | None = None  # most tokens of the first text of a pair ...
    second_tokens: int | None = None  # ... and of the second
    task: str | None = None  # the instruction of a reranker
    raw: bool = False  # scores without their activation


@dataclass(slots=True)
class ScoredPairs:
    """The inputs whose vectors give the scores of ``pairs``; a text is embedded once."""

    pairs: Sequence[Pair]
    recipe: PoolingRecipe
    raw: bool
    inputs: list[PoolingInput] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)  # text -> its input, of an embedder

    def scores(self, vectors: Sequence[Float32Array]) -> list[float]:
        """The score of each pair, from the vectors of all inputs."""
        if self.recipe.kind == "embed":
            vector_pairs = [
                (vectors[self._places[pair.first]], vectors[self._places[pair.second]])
                for pair in self.pairs
            ]
            return [similarity(first, second, self.recipe) for first, second in vector_pairs]
        activation = "identity" if self.raw else self.recipe.activation
        return [float(activated(vector, activation)[0]) for vector in vectors]

    def add(self, text: str, pooling_input: PoolingInput, path: str) -> None:
        """Adds the input of an embedder's text."""
        self._places[text] = len(self.inputs)
        self.inputs.append(pooling_input)
        self.paths.append(path)

    def __contains__(self, text: str) -> bool:
        return text in self._places


def prepare_pairs(
    tokenizer: Tokenizer, recipe: PoolingRecipe, pairs: Sequence[Pair], settings: PairSettings
) -> ScoredPairs:
    """Tokenizes pairs for the kind of model.

    Raises:
        InvalidRequest: the model has several labels, so that no one is the score.
    """
    if recipe.kind == "classify" and not recipe.scores:
        raise InvalidRequest(
            f"Scores need a model of one label, this one has {len(recipe.labels)}.", "model"
        )
    scored = ScoredPairs(pairs, recipe, settings.raw)
    for pair in pairs:
        first = cut_text(tokenizer, pair.first, settings.first_tokens)
        second = cut_text(tokenizer, pair.second, settings.second_tokens)
        if recipe.kind == "embed":
            for text, cut, path in (
                (pair.first, first, pair.first_path),
                (pair.second, second, pair.second_path),
            ):
                if text not in scored:
                    prefix = instruction(recipe, None)
                    pooling_input = text_input(
                        tokenizer, recipe, cut, prefix=prefix, limit=settings.limit
                    )
                    scored.add(text, pooling_input, path)
            continue
        if recipe.label_tokens:
            pooling_input = _template_input(tokenizer, first, second, settings)
        else:
            pooling_input = pair_input(tokenizer, first, second, settings.limit)
        scored.inputs.append(pooling_input)
        scored.paths.append(pair.second_path)
    return scored


def _template_input(
    tokenizer: Tokenizer, first: str, second: str, settings: PairSettings
) -> PoolingInput:
    """A reranker's prompt: the texts between the template's parts are cut, not these."""
    start, end = tokenizer.encode(RERANK_SYSTEM, False), tokenizer.encode(RERANK_END, False)
    task = RERANK_TASK if settings.task is None else settings.task
    text = f"<Instruct>: {task}\n<Query>: {first}\n<Document>: {second}"
    middle = tokenizer.encode(text, False)
    if settings.limit is not None:
        middle = middle[: max(settings.limit - len(start) - len(end), 0)]
    return PoolingInput([*start, *middle, *end])


def cut_text(tokenizer: Tokenizer, text: str, limit: int | None) -> str:
    """The text of the first ``limit`` tokens."""
    if limit is None:
        return text
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    if len(encoding.ids) <= limit:
        return text
    return text[: encoding.offsets[limit - 1][1]] if limit > 0 else ""


def make_pairs(
    first: Sequence[str], second: Sequence[str], first_name: str, second_name: str
) -> list[Pair]:
    """One text with each of several, or as many of both.

    Raises:
        InvalidRequest: the numbers do not fit, or a text is empty.
    """
    for texts, name in ((first, first_name), (second, second_name)):
        if not texts:
            raise InvalidRequest(f"'{name}' must not be empty.", name, "empty_prompt")
        for place, text in enumerate(texts):
            if not text:
                path = f"{name}[{place}]"
                raise InvalidRequest(f"'{path}' must not be empty.", path, "empty_prompt")
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"{first_name} has {len(first)} texts and {second_name} has {len(second)}: the first "
            "must have one, or as many as the second.",
            second_name,
        )
    firsts = list(first) * (len(second) if len(first) == 1 else 1)
    return [
        Pair(one, other, f"{first_name}[{i if len(first) > 1 else 0}]", f"{second_name}[{i}]")
        for i, (one, other) in enumerate(zip(firsts, second, strict=True))
    ]


def ranked(scores: list[float], top_n: int | None) -> list[int]:
    """The places of the scores, the highest first, ties by place; ``top_n`` 0 or None is all."""
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    return order[: top_n or len(order)]
