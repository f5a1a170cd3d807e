"""The names of ``ray.serve.llm.openai_api_models``: bodies and replies of Rayfin's API."""

from rayfin.deployments.api.openai.bodies import ChatCompletionRequest, CompletionRequest
from rayfin.deployments.api.openai.replies import ChatCompletion as ChatCompletionResponse
from rayfin.deployments.api.openai.replies import Completion as CompletionResponse
from rayfin.deployments.pooling.bodies import EmbeddingRequest, ScoreRequest
from rayfin.deployments.pooling.replies import EmbeddingReply as EmbeddingResponse

__all__ = [
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "CompletionRequest",
    "CompletionResponse",
    "EmbeddingRequest",
    "EmbeddingResponse",
    "ScoreRequest",
]
