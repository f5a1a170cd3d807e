"""POST /v1/decisions and /v1/systemone: typed questions, answered by probabilities of labels.

Each question is a prompt that ends where its answer begins; all begin with what they are about, so
that it is computed once. The labels of its options are single tokens there. Their probabilities are
the answer. The first is OpenAI's form, the second TypeSafe's, as in vLLM.
"""

import json
import math
import string
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.generation.choice import Choice, Prompt
from rayfin.deployments.generation.generation import Generation
from rayfin.deployments.generation.prompt_forms import check_salt
from rayfin.deployments.generation.prompts import chat_prompt, thinking_variables
from rayfin.deployments.generation.route import GenerationAdapter
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.text.checks import (
    as_choice,
    as_list,
    as_object,
    as_string,
    missing,
    required,
)
from rayfin.deployments.text.output import TextDelta
from rayfin.deployments.text.parsing.format import thought_start

MAX_QUESTIONS = 64
MAX_TEXTS = 1024  # parts and messages of an input
Kind = Literal["predicate", "choice", "score"]
LETTERS = tuple(string.ascii_uppercase)
LABELS: dict[Kind, tuple[tuple[str, ...], ...]] = {
    "predicate": (("yes", "no"), LETTERS[:2]),
    "choice": (LETTERS,),
    "score": (tuple(string.digits),),
}
"""The first are taken that are single tokens of the model."""

FEWEST: dict[Kind, int] = {"predicate": 2, "choice": 1, "score": 2}


@dataclass(slots=True, frozen=True)
class Question:
    """A question, and its options in the order of their labels."""

    kind: Kind
    name: str | None
    param: str  # its path in the request
    instructions: str
    options: tuple[Any, ...]  # values: texts, or booleans
    descriptions: tuple[str, ...]

    def text(self, labels: Sequence[str]) -> str:
        """Returns the question as the model reads it."""
        lines = [f"Question: {self.instructions}"]
        for label, option, said in zip(labels, self.options, self.descriptions, strict=True):
            shown = "yes" if option is True else "no" if option is False else option
            lines.append(f"{label}: {shown}{f' ({said})' if said else ''}")
        return "\n".join([*lines, f"Answer with one of {', '.join(labels)}, and nothing else."])

    def check(self) -> None:
        """Raises:
        InvalidRequest: it has too few or too many options, or one twice.
        """
        low, high = FEWEST[self.kind], len(LABELS[self.kind][0])
        if not low <= len(self.options) <= high:
            raise InvalidRequest(
                f"A {self.kind} has {low} to {high} options, got {len(self.options)}.", self.param
            )
        if len({_written(option) for option in self.options}) < len(self.options):
            raise InvalidRequest("Two options are the same.", self.param)


@dataclass(slots=True, frozen=True)
class DecidedAnswer:
    """The probabilities of a question's options among themselves, and what the labels have."""

    question: Question
    shares: tuple[float, ...]
    mass: float  # of all labels among all tokens
    is_label: bool  # the likeliest token is one

    @property
    def best(self) -> int:
        return max(range(len(self.shares)), key=self.shares.__getitem__)

    @property
    def confidence(self) -> float:
        """Returns the best option's probability among all tokens."""
        return self.shares[self.best] * self.mass

    @property
    def score(self) -> float:
        return math.fsum(i * share for i, share in enumerate(self.shares))


class _AskedBody(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    questions: Any = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def subject(self) -> str:
        """Returns what all questions are about."""
        raise NotImplementedError

    def asked(self) -> list[Question]:
        raise NotImplementedError

    def ignored_fields(self) -> list[str]:
        return list(self.model_extra or {})


class DecisionRequest(_AskedBody):
    """OpenAI's form."""

    input: Any = None
    safety_identifier: str | None = None

    def subject(self) -> str:
        if isinstance(self.input, str):
            return self.input
        texts = []
        for i, written in enumerate(as_list(self.input, "input", MAX_TEXTS, "a text or messages")):
            content = required(as_object(written, f"input[{i}]"), "content", f"input[{i}]")
            path = f"input[{i}].content"
            parts = [{"type": "input_text", "text": content}]
            if not isinstance(content, str):
                parts = list(as_list(content, path, MAX_TEXTS))
            for j, part in enumerate(parts):
                where = f"{path}[{j}]"
                kinds = ("input_text",)
                as_choice(required(as_object(part, where), "type", where), kinds, f"{where}.type")
                texts.append(as_string(required(part, "text", where), f"{where}.text"))
        return "\n".join(texts)

    def asked(self) -> list[Question]:
        listed = as_list(self.questions, "questions", MAX_QUESTIONS)
        return [self._question(written, f"questions[{i}]") for i, written in enumerate(listed)]

    def _question(self, written: object, path: str) -> Question:
        given = as_object(written, path)
        kind: Any = as_choice(required(given, "type", path), tuple(LABELS), f"{path}.type")
        name = None if given.get("name") is None else as_string(given["name"], f"{path}.name")
        text = as_string(required(given, "instructions", path), f"{path}.instructions")
        member, key = {"choice": ("choices", "value"), "score": ("levels", "label")}.get(
            kind, ("", "")
        )
        options: list[Any] = [True, False] if not member else []
        descriptions = ["", ""] if not member else []
        where = f"{path}.{member}" if member else path
        listed = as_list(required(given, member, path), where, MAX_TEXTS) if member else ()
        for i, option in enumerate(listed):
            option = as_object(option, f"{where}[{i}]")
            value = required(option, key, f"{where}[{i}]")
            is_plain = isinstance(value, bool) and kind == "choice"
            options.append(value if is_plain else as_string(value, f"{where}[{i}].{key}"))
            said = option.get("description") or ""
            descriptions.append(as_string(said, f"{where}[{i}].description"))
        return Question(kind, name, where, text, tuple(options), tuple(descriptions))


class SystemOneRequest(_AskedBody):
    """TypeSafe's form."""

    state: Any = None
    instructions: Any = None

    def subject(self) -> str:
        if self.state is None:
            raise missing("state")
        return "\n\n".join(map(_written, filter(None, (self.instructions, self.state))))

    def asked(self) -> list[Question]:
        given = as_object(self.questions, "questions")
        if not 1 <= len(given) <= MAX_QUESTIONS:
            raise InvalidRequest(f"questions takes 1 to {MAX_QUESTIONS}.", "questions")
        return [self._question(name, written) for name, written in given.items()]

    def _question(self, name: str, written: object) -> Question:
        path = f"questions.{name[:64]}"
        given, where = as_object(written, path), f"{path}.criteria"
        for member in given:
            if member not in ("type", "instructions", "criteria"):
                raise InvalidRequest("A question has no such field.", f"{path}.{member[:64]}")
        kinds = ("noul", "choice", "score")
        kind: Any = as_choice(required(given, "type", path), kinds, f"{path}.type")
        text = _written(given.get("instructions") or name)
        criteria = given.get("criteria")
        if kind == "noul":
            criteria = {} if criteria is None else as_object(criteria, where)
            said = tuple(_written(criteria.get(key) or "") for key in ("true", "false"))
            return Question("predicate", name, where, text, ("yes", "no"), said)
        if kind == "choice":
            options = as_object(criteria, where)
            said = tuple(_written(option or "") for option in options.values())
            return Question(kind, name, where, text, tuple(options), said)
        levels = tuple(map(_written, as_list(criteria, where, MAX_QUESTIONS)))
        return Question(kind, name, where, text, levels, ("",) * len(levels))


class DecisionAdapter(GenerationAdapter):
    """One request for decisions: an engine request of one token for each question."""

    streamed = False

    def __init__(self, service: OpenAIService, body: DecisionRequest | SystemOneRequest) -> None:
        self._service = service
        self._body = body

    async def prepare(self, request: Request) -> Generation:
        body, service = self._body, self._service
        if body.cache_salt is not None:
            check_salt(body.cache_salt)
        self._questions = body.asked()
        self._labels = [self._tokens_of(question) for question in self._questions]
        service.replies.check_prompts(len(self._questions), "questions")
        subject = body.subject()
        prompts = [
            await self._prompt(subject, question, list(labels))
            for question, labels in zip(self._questions, self._labels, strict=True)
        ]
        ids = {token for labels in self._labels for tokens in labels.values() for token in tokens}
        return await Generation.prepare(
            service,
            prompts,
            SamplingParams(
                max_tokens=1,
                temperature=0,
                logprob_token_ids=sorted(ids),
                logprobs_mode="raw_logprobs",
            ),
            request_id=f"decision-{uuid.uuid4().hex}",
            priority=0,
            caller=Caller.of(request),
        )

    def _tokens_of(self, question: Question) -> dict[str, list[int]]:
        """Returns the tokens of each label; ``Yes`` counts as ``yes``.

        Raises:
            InvalidRequest: a label is no single token.
        """
        question.check()
        encode = self._service.tokenizer.encode
        for labels in LABELS[question.kind]:
            tokens = {}
            for label in labels[: len(question.options)]:
                spelled = [encode(text, False) for text in sorted({label, label.capitalize()})]
                tokens[label] = [ids[0] for ids in spelled if len(ids) == 1]
            if all(tokens.values()):
                return tokens
        raise InvalidRequest(
            f"The labels of a {question.kind} are no single tokens of this model.",
            question.param,
            "unsupported_parameter",
        )

    async def _prompt(self, subject: str, question: Question, labels: list[str]) -> Prompt:
        chat = await chat_prompt(
            self._service,
            [{"role": "user", "content": f"{subject}\n\n{question.text(labels)}"}],
            question.param,
            variables=thinking_variables(self._body.chat_template_kwargs, "none"),
        )
        if thought_start(self._service.formats.reasoning, chat.opening):
            raise InvalidRequest(
                "The model begins with a thought, and a decision is its first token.",
                "chat_template_kwargs",
            )
        return Prompt(chat.ids, question.param, cache_salt=self._body.cache_salt)

    def reply(self, generation: Generation) -> str:
        answers = [
            self._answer(question, list(labels.values()), choice)
            for question, labels, choice in zip(
                self._questions, self._labels, generation.choices, strict=True
            )
        ]
        usage = generation.usage()
        write = _decision if isinstance(self._body, DecisionRequest) else _system_one
        head = {"model": self._service.name, "created": int(time.time())}
        tokens = {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        }
        return json.dumps(write(head, answers, tokens), ensure_ascii=False)

    def _answer(self, question: Question, labels: list[list[int]], choice: Choice) -> DecidedAnswer:
        known = dict(choice.logprobs[0].top)
        each = [math.fsum(math.exp(known[token]) for token in tokens) for tokens in labels]
        mass = math.fsum(each)
        shares = tuple(one / mass if mass else 1 / len(each) for one in each)
        is_label = choice.token_ids[0] in {token for tokens in labels for token in tokens}
        return DecidedAnswer(question, shares, mass, is_label)

    def events(self, choice: Choice, delta: TextDelta) -> Iterable[str]:
        raise NotImplementedError("decisions are not streamed")

    def failure(self, error: Exception) -> Iterable[str]:
        raise NotImplementedError("decisions are not streamed")


def _decision(
    head: dict[str, Any], answers: list[DecidedAnswer], tokens: dict[str, int]
) -> dict[str, Any]:
    """Returns a reply in OpenAI's form."""
    written = []
    for answer in answers:
        question = answer.question
        shown: dict[str, Any] = {"type": question.kind, "name": question.name}
        if question.kind == "predicate":
            written.append({**shown, "probability": answer.shares[0]})
            continue
        pairs = zip(question.options, answer.shares, strict=True)
        if question.kind == "choice":
            shown["choice"] = question.options[answer.best]
            each = [{"value": value, "probability": share} for value, share in pairs]
        else:
            shown["score"] = answer.score
            each = [
                {"value": i, "label": label, "probability": share}
                for i, (label, share) in enumerate(pairs)
            ]
        written.append({**shown, "probabilities": each, "confidence": answer.confidence})
    usage = {
        **tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {"model": head["model"], "answers": written, "usage": usage}


def _system_one(
    head: dict[str, Any], answers: list[DecidedAnswer], tokens: dict[str, int]
) -> dict[str, Any]:
    """Returns a reply in TypeSafe's form."""
    written, diagnostics = {}, {}
    for answer in answers:
        question = answer.question
        keys = [str(i) for i in range(len(question.options))]
        names = keys if question.kind == "score" else list(question.options)
        shown: dict[str, Any] = {"type": question.kind}
        if question.kind == "predicate":
            shown = {"type": "noul", "noul": answer.shares[0]}
        elif question.kind == "choice":
            shown["choice"] = question.options[answer.best]
        else:
            legend = dict(zip(keys, question.options, strict=True))
            shown |= {"score": answer.score, "legend": legend}
        shown["probabilities"] = dict(zip(names, answer.shares, strict=True))
        written[str(question.name)] = {**shown, "confidence": answer.confidence}
        diagnostics[str(question.name)] = {
            "label_mass": answer.mass,
            "argmax_is_label": answer.is_label,
        }
    return {
        "id": f"decision-{uuid.uuid4().hex}",
        "object": "structured_decision",
        **head,
        "answers": written,
        "usage": tokens,
        "diagnostics": diagnostics,
    }


def _written(value: object) -> str:
    """Returns a text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
