"""Request bodies of Anthropic's API."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.generation.bodies import GenerationBody
from rayfin.deployments.http.json_body import rename_error_params
from rayfin.deployments.text.checks import missing

UNSERVED: dict[str, tuple[object, ...]] = {  # field -> values that change nothing
    "container": (),
    "context_management": ({},),
    "mcp_servers": ([],),
}
MAX_TEMPERATURE = 1.0
OUR_NAMES = {"stop": "stop_sequences"}


class PromptBody(BaseModel):
    """The fields of a prompt; None is the same as leaving a field out."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    messages: Any = None
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # the older name of output_config.format
    cache_control: dict[str, Any] | None = None  # see cache_control.py

    def check(self) -> None:
        """Rejects fields that are not supported.

        Raises:
            InvalidRequest: ``param`` names the field.
        """
        extra = self.model_extra or {}
        for name, harmless in UNSERVED.items():
            if extra.get(name) is not None and extra[name] not in harmless:
                raise unserved(name)
        if self.messages is None:
            raise missing("messages")

    def ignored_fields(self) -> list[str]:
        return [name for name in self.model_extra or {} if name not in UNSERVED]


class MessagesRequest(PromptBody):
    max_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Returns the checked sampling settings; ``defaults`` fill the fields that are left out.

        Raises:
            InvalidRequest: a value out of range.
        """
        if self.max_tokens is None:
            raise missing("max_tokens")
        budget = (self.thinking or {}).get("budget_tokens")
        if isinstance(budget, int) and budget >= self.max_tokens:
            raise InvalidRequest(
                f"max_tokens must be greater than thinking.budget_tokens, which is {budget}.",
                "thinking.budget_tokens",
                "integer_above_max_value",
            )
        if self.temperature is not None and self.temperature > MAX_TEMPERATURE:
            raise InvalidRequest(
                f"temperature must be in [0, {MAX_TEMPERATURE:g}], got {self.temperature}.",
                "temperature",
                "decimal_above_max_value",
            )
        shared = GenerationBody(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
        )
        with rename_error_params(OUR_NAMES):
            return shared.sampling_params(defaults, self.max_tokens)


def unserved(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} is not supported by this version of Rayfin.", name, "unsupported_parameter"
    )
