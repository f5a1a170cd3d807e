"""What is done to vectors at the edge: dimensions, activations, similarity, text forms."""

import base64

import numpy as np

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import Float32Array
from rayfin.actors.model_files.pooling_recipe import Activation, PoolingRecipe


def check_dimensions(recipe: PoolingRecipe, dimensions: int | None, model: str) -> None:
    """Refuses dimensions that the model was not trained to be cut to (Matryoshka).

    Raises:
        InvalidRequest: vLLM's rules.
    """
    if dimensions is None:
        return
    if dimensions < 1:
        raise InvalidRequest(
            "Dimensions must be greater than 0", "dimensions", "integer_below_min_value"
        )
    if recipe.matryoshka is None:
        raise InvalidRequest(
            f'Model "{model}" does not support matryoshka representation, changing output '
            "dimensions will lead to poor results.",
            "dimensions",
        )
    if recipe.matryoshka and dimensions not in recipe.matryoshka:
        raise InvalidRequest(
            f'Model "{model}" only supports {list(recipe.matryoshka)} matryoshka dimensions, use '
            "other output dimensions will lead to poor results.",
            "dimensions",
        )
    if dimensions > recipe.dimensions:
        raise InvalidRequest(
            f"dimensions must be at most {recipe.dimensions}, the model's, got {dimensions}.",
            "dimensions",
            "integer_above_max_value",
        )


def cut(vector: Float32Array, dimensions: int | None, *, normalize: bool) -> Float32Array:
    """The first ``dimensions`` of a vector, with length one again if it is to be normalized."""
    if dimensions is None or dimensions >= vector.shape[-1]:
        return vector
    part = vector[..., :dimensions]
    return unit(part) if normalize else part


def unit(vectors: Float32Array) -> Float32Array:
    """Vectors [..., D] of length one."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    result: Float32Array = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return result


def activated(logits: Float32Array, activation: Activation) -> Float32Array:
    """Logits [..., labels] as scores or probabilities."""
    if activation == "identity":
        return logits
    values = logits.astype(np.float64)
    if activation == "sigmoid":
        result = 1.0 / (1.0 + np.exp(-values))
    else:
        shifted = np.exp(values - values.max(axis=-1, keepdims=True))
        result = shifted / shifted.sum(axis=-1, keepdims=True)
    return result.astype(np.float32)


def similarity(first: Float32Array, second: Float32Array, recipe: PoolingRecipe) -> float:
    """The score of two vectors [D]: their cosine, or their product where the model says so."""
    if recipe.similarity == "cosine":
        first, second = unit(first), unit(second)
    return float(first @ second)


def base64_text(vector: Float32Array) -> str:
    """Little-endian fp32 in base64, as OpenAI's."""
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode("ascii")
