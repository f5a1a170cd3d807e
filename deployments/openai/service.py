"""What the handlers of one ingress share."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayfin.actors.errors import ModelNotFound, NotPermitted
from rayfin.deployments.edge.settings import EdgeSettings
from rayfin.deployments.engine_client import EngineClient
from rayfin.deployments.ingress_counts import IngressCounts
from rayfin.deployments.openai.answers import AnswerStore
from rayfin.deployments.openai.load import Load
from rayfin.deployments.openai.quotas import TokenQuotas
from rayfin.deployments.openai.responses.kept import OwnResponses, Responses
from rayfin.deployments.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # its packages are an extra
    from rayfin.deployments.tracing import Tracing


@dataclass(slots=True)
class OpenAIService:
    """One model: its engines, its text side, and the names it is served under."""

    client: EngineClient
    tokenizer: Tokenizer
    model_names: list[str]  # the first one is the name in answers
    max_model_len: int
    chat_template: str | None = None  # in place of the model's own
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    edge: EdgeSettings = field(default_factory=EdgeSettings)
    load: Load = field(default_factory=Load)
    counts: IngressCounts = field(default_factory=IngressCounts)
    responses: Responses = field(default_factory=OwnResponses)
    answers: AnswerStore = field(default_factory=AnswerStore)
    quotas: TokenQuotas | None = None  # None: everybody may use as many tokens as there are
    tracing: "Tracing | None" = None
    created: int = field(default_factory=lambda: int(time.time()))

    def check_priority(self, priority: int, tenant: str) -> None:
        """Raises:
        NotPermitted: requests of ``tenant`` may have no priority but the usual one, 0.
        """
        allowed = self.edge.priority_tenants
        if priority != 0 and allowed is not None and tenant not in allowed:
            raise NotPermitted("Your API key may not set a priority.", "priority")

    def served_name(self, name: str | None) -> str:
        """``name`` if it is served here; the first name served when there is none.

        Raises:
            ModelNotFound: another model.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ModelNotFound(f"The model `{name[:128]}` does not exist.", "model")
        return name
