"""Offline use, with vLLM's names: ``LLM(model).generate(prompts, SamplingParams(...))``."""

import itertools
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.guidance import Guidance
from rayfin.actors.messages import (
    Command,
    EngineRequest,
    EngineStats,
    Hypothesis,
    PoolingTask,
    TokenDeltas,
)
from rayfin.actors.pooling.folder import read_recipe
from rayfin.actors.sampling_params import BeamSearchParams, SamplingParams
from rayfin.deployments.client.deltas import WholeDeltas, split_deltas
from rayfin.deployments.generation.plan import NO_PLAN, AnswerRules, OutputPlan, plan_offline
from rayfin.deployments.guidance.fields import read_structured_outputs
from rayfin.deployments.guidance.tool_choice import declared_tools, read_tool_choice
from rayfin.deployments.guidance.verdicts import InlineChecker
from rayfin.deployments.media.settings import MediaSettings, media_sources, read_limits
from rayfin.deployments.offline.engines import OfflineEngine, start_engine
from rayfin.deployments.offline.lora import LoRARequests, adapters_of, use_adapter
from rayfin.deployments.offline.media import OfflineMedia, list_prompts, list_texts
from rayfin.deployments.offline.metrics import Metric, read_metrics
from rayfin.deployments.offline.outputs import OfflineChoice, PreparedPrompt, RequestOutput
from rayfin.deployments.offline.pooling import (
    OfflinePooling,
    PooledRequest,
    PoolingParams,
    ScoringOutput,
)
from rayfin.deployments.pooling.pairs import ranked
from rayfin.deployments.requests.beams import BeamSearchOutput, build_search, sequence_of
from rayfin.deployments.requests.best_of import candidates, request_logprobs
from rayfin.deployments.requests.build import build_requests, sampling_defaults
from rayfin.deployments.requests.prompts import WrittenPrompt, truncated
from rayfin.deployments.serve.preflight import (
    check_generation_config,
    check_model,
    generation_config_path,
    located,
    tokenizer_path,
)
from rayfin.deployments.text.messages import count_calls
from rayfin.deployments.text.opening import render_prompt
from rayfin.deployments.text.parsing.detect import Detected, detect
from rayfin.deployments.text.parsing.format import ToolGuidance
from rayfin.deployments.text.parsing.rows import check_parsers
from rayfin.deployments.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # for it takes a good part of a second
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's dict of one of them, of ``prompt_embeds``, or multi_modal_data."""

UNLIMITED = {"max_waiting_requests": sys.maxsize}
"""A queue limit protects a server. Offline, the caller decides the size of a batch."""


class LLM:
    """A model for offline use, without a server.

    Keyword arguments are the flags of ``rayfin serve`` (``dtype``, ``max_model_len``, ...).

    Args:
        model: a local folder, a Hugging Face name, or "demo".
        executor: "inline" runs the engine in this process, "ray" as Ray actors.
        skip_tokenizer_init: loads no tokenizer; prompts are token ids, and outputs have no text.
        hf_token: token of Hugging Face, for its private models; it becomes HF_TOKEN.
        generation_config: "auto" loads default sampling parameters from the model; "none" ignores
            them; or a folder with a generation_config.json.
        override_generation_config: default sampling parameters, over those.
        tool_call_parser: how the model writes tool calls: "auto" finds it from the chat template,
            "none" leaves them as text, or a name, such as "hermes".
        reasoning_parser: how the model writes its reasoning: the same.
        tool_guidance: arguments of calls with ``tool_choice`` auto are any object ("json"), follow
            the tool's schema ("schema"), or are as the model writes them ("off").
        limit_mm_per_prompt: the most images or clips of a prompt: {"image": 8, "audio": 8}.
        allowed_local_media_path: folder of files that prompts may name as file: addresses.
        allowed_media_domains: hosts that media are fetched from; None: all public ones.

    Raises:
        InvalidConfig: a setting is unknown or invalid, or the model cannot be served.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        executor: str = "inline",
        skip_tokenizer_init: bool = False,
        hf_token: str | None = None,
        chat_template: str | None = None,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        tool_guidance: ToolGuidance = "json",
        limit_mm_per_prompt: Mapping[str, int] | None = None,
        allowed_local_media_path: str = "",
        allowed_media_domains: Sequence[str] | None = None,
        **settings: Any,
    ) -> None:
        if hf_token:
            os.environ["HF_TOKEN"] = hf_token
        check_parsers(tool_call_parser, reasoning_parser)
        args = EngineArgs.from_dict({"model": model, **UNLIMITED, **settings})
        check_model(args, tokenizer=False)  # it is loaded below
        self._tokenizer: Tokenizer | None = None
        if not skip_tokenizer_init:
            self._tokenizer = Tokenizer.load(
                tokenizer_path(args), args.trust_remote_code, **args.tokenizer_hub
            )
        path, hosts = media_sources(allowed_local_media_path, allowed_media_domains)
        media = MediaSettings(
            max_images=read_limits(limit_mm_per_prompt),
            max_audios=read_limits(limit_mm_per_prompt, "audio"),
            folder=path,
            domains=hosts,
        )
        self._media = OfflineMedia(located(args), media, remote=executor == "ray")
        self._chat_template = chat_template or self._media.template(self._tokenizer)
        self._detect = partial(
            detect,
            tool_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            tool_guidance=tool_guidance,
        )
        self._checker = InlineChecker(self._tokenizer)
        self._engine: OfflineEngine = start_engine(executor, located(args))
        self._pooling = OfflinePooling(
            self._engine, read_recipe(located(args)), self._text_side, args.model
        )
        self._request_numbers = itertools.count()
        self._enqueued: list[PreparedPrompt] = []
        self._asleep = False
        check_generation_config(generation_config)
        self._defaults = sampling_defaults(
            generation_config_path(generation_config, args), override_generation_config, **args.hub
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Completes the prompts in one batch. Outputs are in the order of the prompts.

        Args:
            prompts: one prompt or several.
            sampling_params: one for all prompts or one for each; None uses the defaults.
            lora_request: a LoRA adapter for all prompts, or one or None for each.

        Raises:
            InvalidRequest: a prompt does not fit, the numbers of prompts and settings differ, or
                an adapter cannot be served.
        """
        listed = list_prompts(prompts, embeds=True)
        params = self._params_for(listed, sampling_params)
        listed, tokens = self._media.place(listed, [self._tokens(prompt) for prompt in listed])
        made = {id(param): self._plan(param) for param in params}
        plans = [made[id(param)] for param in params]
        prepared = self._prepare(listed, tokens, params, plans, lora_request)
        return self._complete(prepared, use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[str]:
        """Checks and keeps prompts for ``wait_for_completion``, and returns their request ids.

        Raises:
            InvalidRequest: as ``generate``; then none of the prompts is kept.
        """
        listed = list_prompts(prompts, embeds=True)
        params = self._params_for(listed, sampling_params)
        listed, tokens = self._media.place(listed, [self._tokens(prompt) for prompt in listed])
        prepared = self._prepare(listed, tokens, params, [self._plan(param) for param in params])
        self._enqueued += prepared
        return [each.result.request_id for each in prepared]

    def wait_for_completion(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Runs all enqueued prompts in one batch. Outputs are in the order they were enqueued."""
        prepared, self._enqueued = self._enqueued, []
        return self._complete(prepared, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = True,
    ) -> list[BeamSearchOutput]:
        """Searches for the ``params.beam_width`` most likely completions of each prompt.

        Raises:
            InvalidRequest: a prompt does not fit, or this engine cannot run the search.
        """
        requests = [
            build_search(
                self._tokens(prompt),
                params,
                self._engine.info,
                request_id=str(next(self._request_numbers)),
                eos_token_ids=self._tokenizer.eos_token_ids if self._tokenizer else (),
                arrival=time.monotonic(),
            )
            for prompt in list_texts(prompts)
        ]
        hypotheses: dict[int, Sequence[Hypothesis]] = {}
        with tqdm(
            total=len(requests), desc="Searched prompts", disable=not use_tqdm, dynamic_ncols=True
        ) as bar:
            for message in self._engine.run(requests):
                _raise_first_error(message)
                hypotheses.update((ended.key, ended.hypotheses) for ended in message.ended)
                bar.update(len(message.ended))
        return [
            BeamSearchOutput(
                [
                    sequence_of(hypothesis, request, params, self._tokenizer)
                    for hypothesis in hypotheses[request.key]
                ]
            )
            for request in requests
        ]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, through the model's chat template.

        Outputs have ``tool_calls`` and ``reasoning`` apart from their text.

        Args:
            tools: functions in OpenAI's form, for all conversations.
            tool_choice: "none", "auto", "required" or one function, as in OpenAI's API.
            chat_template_kwargs: further variables of the template, such as ``enable_thinking``.
            lora_request: as in :meth:`generate`, for each conversation.

        Raises:
            InvalidRequest: there is no template, it refuses the messages, or bad tools.
        """
        tokenizer = self._text_side()
        conversations: list[Any] = (
            [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        )
        params = self._params_for(conversations, sampling_params)
        declared = declared_tools(tools)
        functions = declared.functions
        rules = AnswerRules(functions, read_tool_choice(tool_choice, functions))
        render = partial(
            render_prompt,
            tokenizer,
            formats=self._formats,
            tools=declared.shown,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=self._chat_template,
            variables=chat_template_kwargs,
        )
        info = self._engine.info
        prompts = [self._media.chat(render, said, info) for said in conversations]
        plans = [
            self._plan(param, rules, prompt.opening, count_calls(conversation))
            for param, prompt, conversation in zip(params, prompts, conversations, strict=True)
        ]
        written = [
            WrittenPrompt(
                f"messages[{i}]",
                None if prompt.embeds else tokenizer.decode(prompt.ids, False),
                images=prompt.images,
                embeds=prompt.embeds,
            )
            for i, prompt in enumerate(prompts)
        ]
        ids = [prompt.ids for prompt in prompts]
        prepared = self._prepare(written, ids, params, plans, lora_request)
        return self._complete(prepared, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[PooledRequest]:
        """Embeds the prompts in one batch; ``outputs.embedding`` is a list of floats.

        Raises:
            InvalidRequest: a prompt does not fit, or the model does not embed.
        """
        params = pooling_params or PoolingParams()
        return self._pooling.embed(list_texts(prompts), params, use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[PooledRequest]:
        """Returns the probabilities of the model's labels, as ``outputs.probs``.

        Raises:
            InvalidRequest: a prompt does not fit, or the model does not classify.
        """
        params = pooling_params or PoolingParams()
        return self._pooling.classify(list_texts(prompts), params, use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        use_tqdm: bool = True,
    ) -> list[PooledRequest]:
        """Returns what the model pools, as arrays ``outputs.data``: [D], or [tokens, D].

        Args:
            pooling_task: embed, classify, token_embed or token_classify; None: the model's own.

        Raises:
            InvalidRequest: a prompt does not fit, or the model generates.
        """
        params = pooling_params or PoolingParams()
        return self._pooling.encode(list_texts(prompts), params, pooling_task, use_tqdm)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[PooledRequest]:
        """Scores pairs: one text with each of several, or as many of both (``outputs.score``).

        Raises:
            InvalidRequest: a text does not fit, or the model gives a pair no one number.
        """
        params = pooling_params or PoolingParams()
        return self._pooling.score(text_1, text_2, params, use_tqdm)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        top_n: int | None = None,
        use_tqdm: bool = True,
    ) -> list[tuple[int, float]]:
        """Returns (place, score) of the documents, the best first; ties are in their order.

        Raises:
            InvalidRequest: as :meth:`score`.
        """
        found = self.score(query, documents, pooling_params, use_tqdm=use_tqdm)
        scores = [one.outputs.score for one in found if isinstance(one.outputs, ScoringOutput)]
        return [(place, scores[place]) for place in ranked(scores, top_n)]

    @cached_property
    def _formats(self) -> Detected:
        """How the model writes calls and thoughts; found at the first chat."""
        return self._detect(self._text_side(), self._chat_template)

    def get_tokenizer(self) -> "PreTrainedTokenizerFast":
        """Returns transformers' tokenizer of the model.

        Raises:
            InvalidRequest: ``skip_tokenizer_init`` was set.
        """
        return self._text_side().inner

    def _text_side(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequest("this LLM has no tokenizer (skip_tokenizer_init=True)", "prompt")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that ``generate`` uses by default: the model's own."""
        return SamplingParams(**self._defaults)

    def stats(self) -> EngineStats:
        """Returns the engine's counters."""
        return self._engine.stats()

    def get_metrics(self) -> list[Metric]:
        """Returns the engine's metrics, under their names at /metrics and under vLLM's."""
        return read_metrics(self._engine.stats(), self._engine.info.name)

    def reset_prefix_cache(self) -> bool:
        """Removes all cached prefixes; returns True, for between calls no request holds one."""
        self._engine.carry_out(Command.RESET_CACHE)
        return True

    def sleep(self, level: int = 1) -> None:
        """Frees the memory of the KV cache; cached prefixes are lost.

        Args:
            level: 0 and 1 keep the weights. vLLM's 2, which drops them, is refused.

        Raises:
            InvalidRequest: another level.
        """
        if level not in (0, 1):
            raise InvalidRequest(f"level must be 0 or 1: the weights stay; got {level}", "level")
        self._engine.carry_out(Command.SLEEP)
        self._asleep = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocates the KV cache again.

        Args:
            tags: vLLM's "weights" and "kv_cache"; only the latter has been asleep.
        """
        if tags is None or "kv_cache" in tags:
            self._engine.carry_out(Command.WAKE)
            self._asleep = False

    def check_integrity(self) -> None:
        """Checks the cache's invariants. Between calls, no request holds a page.

        Raises:
            CacheError: an invariant is broken.
        """
        self._engine.check_integrity()

    def close(self) -> None:
        """Frees the model and stops the Ray cluster that was started for it."""
        self._engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _tokens(self, prompt: WrittenPrompt) -> list[int]:
        return self._media.tokens(prompt, self._tokenizer, self._engine.info.max_model_len)

    def _params_for(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequest(
                f"{len(prompts)} prompts and {len(params)} sampling_params", "sampling_params"
            )
        return list(params)

    def _prepare(
        self,
        prompts: Sequence[WrittenPrompt],
        tokens: list[list[int]],
        params: list[SamplingParams],
        plans: list[OutputPlan],
        lora_request: LoRARequests = None,
    ) -> list[PreparedPrompt]:
        """Builds the engine requests of prompts; none runs yet."""
        prepared: list[PreparedPrompt] = []
        adapters = iter(adapters_of(lora_request, len(prompts)))
        for prompt, ids, param, plan in zip(prompts, tokens, params, plans, strict=True):
            request_id = str(next(self._request_numbers))
            requests = self._build(prompt, ids, candidates(param), request_id, plan.guidance)
            if len(requests) > param.n:
                request_logprobs(requests)
            use_adapter(requests, next(adapters))
            shown = self._media.shown(requests[0].prompt)
            result = RequestOutput(request_id, prompt.text, shown, [])
            choices = []
            for request in requests:
                choice = OfflineChoice(request, param, self._tokenizer, result, plan)
                choices.append(choice)
                result.outputs.append(choice.output)
            prepared.append(PreparedPrompt(result, choices, param))
        return prepared

    def _complete(self, prepared: Sequence[PreparedPrompt], use_tqdm: bool) -> list[RequestOutput]:
        """Runs prepared prompts; outputs are in their order."""
        if self._asleep:
            raise InvalidRequest("the engine sleeps: call wake_up() first", "prompt")
        choices = {choice.request.key: choice for each in prepared for choice in each.choices}
        with tqdm(
            total=len(choices), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True
        ) as bar:
            self._drive(choices, bar)
        return [each.finished() for each in prepared]

    def _build(
        self,
        prompt: WrittenPrompt,
        ids: list[int],
        params: SamplingParams,
        request_id: str,
        guidance: Guidance | None,
    ) -> list[EngineRequest]:
        info = self._engine.info
        return build_requests(
            truncated(ids, params, info.max_model_len, uncut=prompt.uncut),
            params,
            info,
            request_id=request_id,
            eos_token_ids=self._tokenizer.eos_token_ids if self._tokenizer else (),
            arrival=time.monotonic(),
            param=prompt.param,
            tokenizer=self._tokenizer,
            cache_salt=prompt.cache_salt,
            guidance=guidance,
            images=prompt.images,
            embeds=self._media.embeds(prompt, info, params),
        )

    def _plan(
        self,
        params: SamplingParams,
        rules: AnswerRules | None = None,
        opening: str = "",
        earlier_calls: int = 0,
    ) -> OutputPlan:
        """How outputs are guided and read; grammars are compiled once, in this process.

        Args:
            rules: of a chat; None for plain completions.
        """
        if params.structured_outputs is None and rules is None:
            return NO_PLAN
        formats = Detected() if rules is None else self._formats
        rules = AnswerRules() if rules is None else rules
        if params.structured_outputs is not None:
            form = read_structured_outputs(params.structured_outputs, "structured_outputs")
            rules = replace(rules, structured=form.outputs, structured_param=form.param)
        text = self._text_side()
        plan = plan_offline(formats, text, self._checker, rules, opening, earlier_calls)
        if plan.unenforced:
            logger.warning("%s: not enforced: %s", rules.grammar_param, ", ".join(plan.unenforced))
        return plan

    def _drive(self, choices: dict[int, OfflineChoice], bar: "tqdm[Any]") -> None:
        """Runs the engine until all choices are complete."""
        ids = {key: choice.request.request_id for key, choice in choices.items()}
        in_parts = {key: ids[key] for key, choice in choices.items() if not choice.is_read_whole}
        whole = WholeDeltas({key: name for key, name in ids.items() if key not in in_parts})
        started = time.monotonic()
        tokens_in = tokens_out = 0
        for message in self._engine.run([choice.request for choice in choices.values()]):
            _raise_first_error(message)
            parts = split_deltas(message, in_parts) if in_parts else ()
            for key, delta in itertools.chain(parts, whole.push(message)):
                choice = choices[key]
                if choice.output.finish_reason is not None:
                    continue
                if choice.append(delta):
                    self._engine.abort(key)  # stop strings are unknown to the engine
                if choice.output.finish_reason is not None:
                    tokens_in += len(choice.request.prompt)
                    tokens_out += len(choice.output.token_ids)
                    seconds = max(time.monotonic() - started, 1e-9)
                    bar.set_postfix_str(
                        f"in {tokens_in / seconds:.1f} tok/s, out {tokens_out / seconds:.1f} tok/s"
                    )
                    bar.update()


def _raise_first_error(message: TokenDeltas) -> None:
    for ended in message.ended:
        if ended.error is not None:
            raise ended.error
