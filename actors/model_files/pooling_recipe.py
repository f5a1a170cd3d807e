"""How a model's hidden states become vectors, scores or classes; a part of what a model is.

``deployments`` and runners read the same ``PoolingRecipe`` from the model's folder (``folder.py``).
The names are those of sentence-transformers' folders.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rayfin.actors.parts import RequestPart

PoolingTask: TypeAlias = Literal["embed", "classify", "token_embed", "token_classify"]


@dataclass(slots=True, frozen=True)
class Pooling(RequestPart):
    """What a request wants of its prompt's hidden states, in place of tokens."""

    task: PoolingTask = "embed"
    whole: bool = False  # it takes the states of all tokens: no page of the prefix index helps it
    skip: int = 0  # leading tokens that are left out (an instruction)
    second: int | None = None  # tokens from here on are of the second text of a pair

    samples = False

    @property
    def computes_all(self) -> bool:
        return self.whole


Mode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
Activation = Literal["sigmoid", "softmax", "identity"]
Kind = Literal["embed", "classify"]

MODES: tuple[Mode, ...] = (
    *("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"),
)


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer behind the pooling: the folder of its weights and its torch activation."""

    folder: str  # inside the model's
    inputs: int
    outputs: int
    bias: bool
    activation: str  # a class of torch.nn: "Tanh", "Identity"
    residual: bool = False


@dataclass(frozen=True, slots=True)
class PoolingRecipe:
    """What a pooling model does with the hidden states of its last layer."""

    kind: Kind
    encoder: bool  # attention goes both ways: prompts are computed whole, and nothing is cached
    modes: tuple[Mode, ...]  # several are concatenated
    include_prompt: bool = True  # False: an instruction's tokens are left out
    dense: tuple[DenseLayer, ...] = ()
    normalize: bool = False
    dimensions: int = 0  # of a vector, or the number of labels
    matryoshka: tuple[int, ...] | None = None  # dimensions that may be asked for; (): all; None: no
    cut: int | None = None  # dimensions of a vector whose request names none; None: all
    max_tokens: int | None = None  # of a prompt
    lower_case: bool = False
    prompts: tuple[tuple[str, str], ...] = ()  # name -> text before the input
    default_prompt: str | None = None
    labels: tuple[str, ...] = ()
    activation: Activation = "identity"  # of classes and scores
    class_activation: Activation = "softmax"  # of /classify
    similarity: Literal["cosine", "dot"] = "cosine"
    label_tokens: tuple[str, ...] = ()  # whose rows of the head give the labels (Qwen3-Reranker)
    two_way: bool = False  # the score is the second token's share of a softmax over two

    def __post_init__(self) -> None:
        assert self.modes and set(self.modes) <= set(MODES)

    @property
    def scores(self) -> bool:
        """Whether it gives a pair of texts one number (a cross-encoder)."""
        return self.kind == "classify" and len(self.labels) == 1

    @property
    def takes_whole(self) -> bool:
        """Whether a vector takes more hidden states than that of the last token."""
        return self.modes != ("lasttoken",)

    def pooling(
        self, task: PoolingTask | None = None, skip: int = 0, second: int | None = None
    ) -> Pooling:
        """What a request asks for; by default the model's own task."""
        task = task or self.kind
        whole = self.encoder or self.takes_whole or task.startswith("token_")
        return Pooling(task, whole, 0 if self.include_prompt else skip, second)
