"""Answers of the pooling routes, for the description of the API; routes write them as JSON."""

from typing import Literal

from pydantic import BaseModel

Vector = list[float]


class PoolingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: Literal[0] = 0


class PairUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Listed(BaseModel):
    """What answers with a list share."""

    id: str
    object: Literal["list"]
    created: int  # seconds since 1970
    model: str


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: Vector | str  # base64 of little-endian fp32


class EmbeddingReply(Listed):
    """Of /v1/embeddings."""

    data: list[Embedding]
    usage: PoolingUsage


class PooledData(BaseModel):
    object: Literal["pooling"]
    index: int
    data: Vector | list[Vector] | str  # one for the input, one for each token, or base64


class PoolingReply(Listed):
    """Of /pooling."""

    data: list[PooledData]
    usage: PoolingUsage


class Class(BaseModel):
    index: int
    label: str
    probs: Vector
    num_classes: int


class ClassificationReply(Listed):
    """Of /classify."""

    data: list[Class]
    usage: PoolingUsage


class PairScore(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreReply(Listed):
    """Of /score."""

    data: list[PairScore]
    usage: PairUsage


class RankedText(BaseModel):
    text: str


class RankedDocument(BaseModel):
    index: int  # in the request
    relevance_score: float
    document: RankedText | None = None


class RerankReply(BaseModel):
    """Of /rerank."""

    id: str
    model: str
    usage: PairUsage
    results: list[RankedDocument]  # the best first


class CohereVectors(BaseModel):
    float: list[Vector]


class CohereVersion(BaseModel):
    version: str


class CohereUnits(BaseModel):
    input_tokens: int


class CohereMeta(BaseModel):
    api_version: CohereVersion
    billed_units: CohereUnits


class CohereEmbedReply(BaseModel):
    """Of /v2/embed."""

    id: str
    embeddings: CohereVectors
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"]
