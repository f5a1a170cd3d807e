"""How large a request may be, and what replies say unasked."""

from dataclasses import dataclass

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.sampling_params import SamplingParams
from rayfin.actors.timing import SSE_COMMENT_SECONDS

MAX_PROMPTS = 1024  # of one HTTP request
MAX_CHOICES = 16384  # prompts x n of one HTTP request
MAX_STOP_STRINGS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySettings:
    """What a server lets requests ask for, and what its replies say unasked."""

    max_prompts: int = MAX_PROMPTS
    trust_chat_templates: bool = False  # of requests
    force_usage: bool = False  # in each chunk of each stream
    tokens_as_ids: bool = False  # the default of return_tokens_as_token_ids
    prompt_tokens_details: bool = True  # in usage
    metrics: bool = False  # times of each request
    drop_images: bool = False  # those that the model cannot read become lines of text
    hide_barred_tools: bool = False  # from chat templates, with tool_choice none
    response_role: str = "assistant"  # of chat completions, unless the last message is continued
    comment_seconds: float = SSE_COMMENT_SECONDS  # of silence, until a stream says that; 0: never

    def check_prompts(self, count: int, param: str) -> None:
        """Raises:
        InvalidRequest: a request of more prompts than the server takes; ``param`` is their field.
        """
        if count > self.max_prompts:
            raise InvalidRequest(
                f"'{param}' takes at most {self.max_prompts} prompts, got {count}.",
                param,
                "array_above_max_length",
            )

    def check(self, params: SamplingParams, prompts: int) -> None:
        """Checks the size of a request.

        Raises:
            InvalidRequest: too many choices or stop strings.
        """
        name, of_each = ("best_of", params.best_of) if params.best_of else ("n", params.n)
        if (count := prompts * of_each) > MAX_CHOICES:
            raise InvalidRequest(
                f"prompts times {name} must be at most {MAX_CHOICES}, got {count}.", name
            )
        if (count := len(params.stop or ())) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop takes at most {MAX_STOP_STRINGS} strings, got {count}.",
                "stop",
                "array_above_max_length",
            )
