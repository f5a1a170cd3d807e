"""POST /api/chat and /api/generate."""

import json
import logging
import time
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request

from rayfin.actors.errors import RayfinError, RequestFailed
from rayfin.deployments.api.ollama.bodies import OllamaBody, OllamaGenerate
from rayfin.deployments.generation.choice import AnswerCall, Choice, Prompt
from rayfin.deployments.generation.generation import Generation
from rayfin.deployments.generation.plan import plan_answers, plan_text
from rayfin.deployments.generation.prompts import chat_prompt, shown_tools, text_ids
from rayfin.deployments.generation.route import GenerationAdapter
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.generation.usage import RequestTimes
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.errors import error_body
from rayfin.deployments.text.messages import count_calls
from rayfin.deployments.text.output import TextDelta
from rayfin.deployments.text.parsing.json_text import read_object

logger = logging.getLogger("rayfin.http")

LINES = "application/x-ndjson"
MILLISECOND = 1_000_000  # nanoseconds


class OllamaAdapter(GenerationAdapter):
    """One request, of either route.

    Args:
        name: of the model, as the client wrote it.
    """

    stream_type = LINES

    def __init__(self, service: OpenAIService, body: OllamaBody) -> None:
        self._service, self._body = service, body
        self._is_chat = not isinstance(body, OllamaGenerate)
        self._began = time.monotonic()
        self.streamed = body.stream is not False

    async def prepare(self, request: Request) -> Generation:
        body, service, caller = self._body, self._service, Caller.of(request)
        params = body.sampling_params(service.sampling_defaults)
        if isinstance(body, OllamaGenerate) and body.raw:
            prompt = Prompt(await text_ids(service, body.raw_prompt(), "prompt"), "prompt")
            plan = await plan_text(service, body.rules(), caller.tenant)
        else:
            messages = body.chat()
            param = "messages" if self._is_chat else "prompt"
            rendered = await chat_prompt(
                service,
                messages,
                param,
                tools=shown_tools(service, body.declared_tools, False),
                variables=body.template_variables(),
            )
            prompt = Prompt.of(rendered, param)
            plan = await plan_answers(
                service,
                body.rules(),
                rendered.opening,
                earlier_calls=count_calls(messages),
                tenant=caller.tenant,
            )
        generation = await Generation.prepare(
            service,
            [prompt],
            params,
            request_id=f"ollama-{uuid.uuid4().hex}",
            priority=0,
            caller=caller,
            plan=plan,
        )
        self._choice = generation.choices[0]
        self._choice.times, self._choice.request.timed = RequestTimes(), True
        return generation

    def reply(self, generation: Generation) -> str:
        choice = self._choice
        calls = choice.parsed.whole_calls
        return self._line(choice.content or "", choice.reasoning, calls, self._end())

    def events(self, choice: Choice, delta: TextDelta) -> list[str]:
        if not choice.parsed.plan.make_parser:
            return [self._line(delta.text) + "\n"] if delta.text else []
        text = {"reasoning": "", "content": ""}
        calls = []
        for event in delta.events:
            if event.kind in text:
                text[event.kind] += event.text
            elif event.kind == "call_end":
                calls.append(choice.calls[event.index])
        if not (calls or any(text.values())):
            return []
        return [self._line(text["content"], text["reasoning"], calls) + "\n"]

    def closing(self) -> Iterable[str]:
        yield self._line(end=self._end()) + "\n"

    def failure(self, error: Exception) -> Iterable[str]:
        if not isinstance(error, RayfinError):
            logger.exception("A stream failed")
        yield json.dumps({"error": error_body(error)["error"]["message"]}) + "\n"

    def _line(
        self,
        content: str = "",
        thinking: str = "",
        calls: Iterable[AnswerCall] = (),
        end: dict[str, Any] | None = None,
    ) -> str:
        said: dict[str, Any] = {"content" if self._is_chat else "response": content}
        if thinking:
            said["thinking"] = thinking
        if called := [_written(call) for call in calls]:
            said["tool_calls"] = called
        if self._is_chat:
            said = {"message": {"role": "assistant", **said}}
        line = stamped(self._body.model) | said | {"done": end is not None} | (end or {})
        return json.dumps(line, ensure_ascii=False)

    def _end(self) -> dict[str, Any]:
        """Returns why the answer ended, and its counts and durations in nanoseconds.

        Raises:
            RequestFailed: the engine aborted the request.
        """
        choice = self._choice
        reason = choice.last.finish_reason
        if reason not in ("stop", "length", "repetition"):
            raise RequestFailed("The engine aborted this request.")
        times = (choice.times or RequestTimes()).metrics(len(choice.token_ids))
        return {
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": int((time.monotonic() - self._began) * 1000 * MILLISECOND),
            "load_duration": 0,
            "prompt_eval_count": len(choice.prompt.ids),
            "prompt_eval_duration": int((times.time_to_first_token_ms or 0) * MILLISECOND),
            "eval_count": len(choice.token_ids),
            "eval_duration": int((times.generation_time_ms or 0) * MILLISECOND),
        }


def stamped(model: str) -> dict[str, Any]:
    """Returns what every line begins with."""
    return {"model": model, "created_at": datetime.now(UTC).isoformat()}


def _written(call: AnswerCall) -> dict[str, Any]:
    return {"function": {"name": call.name, "arguments": read_object(call.arguments) or {}}}
