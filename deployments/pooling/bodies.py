"""Bodies of the pooling routes, with vLLM's fields and those of the API each comes from."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.generation.limits import PRIORITIES
from rayfin.deployments.generation.prompt_forms import check_salt
from rayfin.deployments.pooling.inputs import Cut


class PoolingBody(BaseModel):
    """What all bodies share; None is the same as leaving a field out."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None  # None: right
    add_special_tokens: bool | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def ignored_fields(self) -> list[str]:
        return list(self.model_extra or {})

    def check(self) -> None:
        """Checks the fields that the types do not.

        Raises:
            InvalidRequest: ``param`` is the field.
        """
        if self.cache_salt is not None:
            check_salt(self.cache_salt)
        if self.priority is not None and self.priority not in PRIORITIES:
            raise InvalidRequest("priority must fit 32 bits.", "priority")

    @property
    def cut(self) -> Cut:
        return Cut(self.truncate_prompt_tokens, self.truncation_side or "right")


class InputBody(PoolingBody):
    """A body of inputs: texts, token ids, or a conversation."""

    input: Any = None
    messages: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_name: str | None = None  # one of the model's prompts
    encoding_format: Literal["float", "base64"] | None = None

    def check(self) -> None:
        PoolingBody.check(self)
        if self.input is not None and self.messages is not None:
            raise InvalidRequest("input and messages exclude each other.", "messages")


class EmbeddingRequest(InputBody):
    """POST /v1/embeddings."""

    dimensions: int | None = None


class ClassificationRequest(InputBody):
    """POST /classify."""

    use_activation: bool | None = None


class PoolingRequest(InputBody):
    """POST /pooling."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    dimensions: int | None = None
    use_activation: bool | None = None


class CohereEmbedRequest(PoolingBody):
    """POST /v2/embed: Cohere's, for texts and floats."""

    texts: Any = None
    inputs: Any = None  # [{"content": [{"type": "text", "text": ...}]}]
    input_type: str | None = None
    embedding_types: list[str] | None = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] | None = None  # None: END
    max_tokens: int | None = None


class PairBody(PoolingBody):
    """What bodies of pairs share."""

    instruction: str | None = None  # of a reranker with a template
    use_activation: bool | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None


class ScoreRequest(PairBody):
    """POST /score: one query and its documents, or as many of both."""

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None


class RerankRequest(PairBody):
    """POST /rerank: Jina's and Cohere's."""

    query: Any = None
    documents: Any = None
    top_n: int | None = None
    return_documents: bool | None = None
