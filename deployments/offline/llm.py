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
from typing import TYPE_CHECKING, Any, Literal

from tqdm import tqdm

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.guidance import Guidance
from rayfin.actors.messages import Command, EngineRequest, Hypothesis, TokenDeltas
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.model_files.pooling_folder import read_recipe
from rayfin.actors.model_files.pooling_recipe import PoolingTask
from rayfin.actors.parts import RequestPart
from rayfin.actors.sampling_params import BeamSearchParams, SamplingParams
from rayfin.deployments.client.deltas import WholeDeltas, split_deltas
from rayfin.deployments.client.weights import UpdateOptions, sleep_command
from rayfin.deployments.generation.beam_requests import BeamSearchOutput, build_search, sequence_of
from rayfin.deployments.generation.best_of import candidates, request_logprobs
from rayfin.deployments.generation.build_requests import build_requests, sampling_defaults
from rayfin.deployments.generation.plan import NO_PLAN, AnswerRules, OutputPlan, plan_offline
from rayfin.deployments.generation.prompt_forms import WrittenPrompt, truncated
from rayfin.deployments.guidance.compile_check import InlineChecker
from rayfin.deployments.guidance.fields import read_structured_outputs
from rayfin.deployments.guidance.tool_choice import read_tool_choice
from rayfin.deployments.guidance.tools import declared_tools
from rayfin.deployments.media.settings import MediaSettings, media_sources, read_limits
from rayfin.deployments.offline.arguments import (
    UseTqdm,
    beside_ids,
    loading,
    priorities_of,
    progress,
    special_tokens,
)
from rayfin.deployments.offline.engines import OfflineEngine, start_engine
from rayfin.deployments.offline.lora import LoRARequests, loras_of, parts_of
from rayfin.deployments.offline.media import OfflineMedia, list_prompts, list_texts
from rayfin.deployments.offline.metrics import Metric, read_metrics
from rayfin.deployments.offline.outputs import OfflineChoice, PreparedPrompt, RequestOutput
from rayfin.deployments.offline.pooling import (
    OfflinePooling,
    PooledRequest,
    PoolingParams,
    ScoringOutput,
    cut_to,
    in_groups,
)
from rayfin.deployments.pooling.pairs import ranked
from rayfin.deployments.serve.preflight import (
    check_generation_config,
    check_model,
    end_tokens,
    generation_config_path,
    located,
    shipped,
    tokenizer_path,
)
from rayfin.deployments.text.generation_prompt import ChatPrompt, render_prompt
from rayfin.deployments.text.messages import count_calls
from rayfin.deployments.text.parsing.detect import Detected, detect
from rayfin.deployments.text.parsing.format import ToolGuidance
from rayfin.deployments.text.parsing.formats import check_parsers
from rayfin.deployments.text.tokenizer import Tokenizer
from rayfin.deployments.vllm.lacks import no_attribute, refuse
from rayfin.deployments.vllm.settings import engine_settings

if TYPE_CHECKING:  # for it takes a good part of a second
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's dict of one of them, of ``prompt_embeds``, or multi_modal_data."""

ContentFormat = Literal["auto", "string", "openai"]

UNLIMITED = {"max_waiting_requests": sys.maxsize}
"""A queue limit protects a server. Offline, the caller decides the size of a batch."""


class LLM:
    """A model for offline use, without a server.

    Keyword arguments are the flags of ``rayfin serve`` (``dtype``, ``max_model_len``, ...), or
    vLLM's of the same meaning (``gpu_memory_utilization``, ``enable_prefix_caching``, ...).

    Args:
        model: a local folder, a Hugging Face name, or "demo".
        executor: "inline" runs the engine in this process, "ray" as Ray actors.
        skip_tokenizer_init: loads no tokenizer; prompts are token ids, and outputs have no text.
        hf_token: token of Hugging Face, for its private models; it becomes HF_TOKEN. True is the
            one of its login.
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
        hf_token: str | bool | None = None,
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
        if isinstance(hf_token, str) and hf_token:
            os.environ["HF_TOKEN"] = hf_token
        check_parsers(tool_call_parser, reasoning_parser)
        args = EngineArgs.from_dict({"model": model, **UNLIMITED, **engine_settings(settings)})
        check_model(args, tokenizer=False)  # it is loaded below
        self._tokenizer: Tokenizer | None = None
        check_generation_config(generation_config)
        self._ends = end_tokens(generation_config, override_generation_config, args)
        with loading(args.model):
            if not skip_tokenizer_init:
                hub: dict[str, Any] = args.tokenizer_hub | {"ends": self._ends}
                self._tokenizer = Tokenizer.load(
                    tokenizer_path(args), args.trust_remote_code, **hub
                )
                self._ends = self._tokenizer.eos_token_ids
            path, hosts = media_sources(allowed_local_media_path, allowed_media_domains)
            media = MediaSettings(
                max_images=read_limits(limit_mm_per_prompt),
                max_audios=read_limits(limit_mm_per_prompt, "audio"),
                folder=path,
                domains=hosts,
            )
            self._media = OfflineMedia.load(located(args), media, remote=executor == "ray")
            self._chat_template = chat_template or self._media.template(self._tokenizer)
            self._detect = partial(
                detect,
                tool_parser=tool_call_parser,
                reasoning_parser=reasoning_parser,
                tool_guidance=tool_guidance,
                plugin=args.plugin,
            )
            self._checker = InlineChecker(self._tokenizer)
            self._engine: OfflineEngine = start_engine(executor, shipped(args))
        self._pooling = OfflinePooling(
            self._engine, read_recipe(located(args)), self._text_side, args.model
        )
        self._request_numbers = itertools.count()
        self._enqueued: list[PreparedPrompt] = []
        self._asleep = False
        self._defaults = sampling_defaults(
            generation_config_path(generation_config, args), override_generation_config, **args.hub
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        *,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Completes the prompts in one batch. Outputs are in the order of the prompts.

        Args:
            prompts: one prompt or several.
            sampling_params: one for all prompts or one for each; None uses the defaults.
            prompt_token_ids: prompts as token ids, as earlier versions of vLLM have them.
            lora_request: a LoRA adapter for all prompts, or one or None for each.
            priority: one for each prompt, the lowest first; it counts with ``policy="priority"``.
            tokenization_kwargs: ``add_special_tokens`` alone.

        Raises:
            InvalidRequest: a prompt does not fit, the numbers of prompts and settings differ, or
                an adapter cannot be served.
        """
        refuse(mm_processor_kwargs=mm_processor_kwargs)
        written = beside_ids(prompts, prompt_token_ids)
        special = special_tokens(tokenization_kwargs)
        prepared = self._completions(written, sampling_params, lora_request, priority, special)
        return self._complete(prepared, use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        use_tqdm: UseTqdm = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Checks and keeps prompts for ``wait_for_completion``, and returns their request ids.

        Args:
            use_tqdm: without effect: nothing runs yet. The others are those of ``generate``.

        Raises:
            InvalidRequest: as ``generate``; then none of the prompts is kept.
        """
        refuse(mm_processor_kwargs=mm_processor_kwargs)
        special = special_tokens(tokenization_kwargs)
        prepared = self._completions(prompts, sampling_params, lora_request, priority, special)
        self._enqueued += prepared
        return [each.result.request_id for each in prepared]

    def _completions(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequests,
        priority: Sequence[int] | None,
        special: bool,
    ) -> list[PreparedPrompt]:
        listed = list_prompts(prompts, embeds=True)
        params = self._params_for(listed, sampling_params)
        tokens = [self._tokens(prompt, special) for prompt in listed]
        listed, tokens = self._media.place(listed, tokens)
        planned = {id(param): self._plan(param) for param in params}
        plans = [planned[id(param)] for param in params]
        return self._prepare(listed, tokens, params, plans, lora_request, priority)

    def wait_for_completion(
        self, output_type: object = None, *, use_tqdm: UseTqdm = True
    ) -> list[RequestOutput]:
        """Runs all enqueued prompts in one batch. Outputs are in the order they were enqueued.

        Args:
            output_type: vLLM's; all outputs are a ``RequestOutput``.
        """
        prepared, self._enqueued = self._enqueued, []
        return self._complete(prepared, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequests = None,
        use_tqdm: UseTqdm = True,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Searches for the ``params.beam_width`` most likely completions of each prompt.

        Args:
            concurrency_limit: vLLM's, without effect: the cache decides how many searches run.

        Raises:
            InvalidRequest: a prompt does not fit, or this engine cannot run the search.
        """
        refuse(lora_request=lora_request)
        requests = [
            build_search(
                self._tokens(prompt),
                params,
                self._engine.info,
                request_id=str(next(self._request_numbers)),
                eos_token_ids=self._ends,
                arrival=time.monotonic(),
            )
            for prompt in list_texts(prompts)
        ]
        hypotheses: dict[int, Sequence[Hypothesis]] = {}
        with progress(use_tqdm, len(requests), "Searched prompts") as bar:
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
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        tool_choice: str | Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, through the model's chat template.

        Outputs have ``tool_calls`` and ``reasoning`` apart from their text.

        Args:
            lora_request: as in :meth:`generate`, for each conversation; ``priority`` too.
            chat_template: replaces the model's; content_format: what it gets as content.
            tools: functions in OpenAI's form, for all conversations.
            chat_template_kwargs: further variables of the template, such as ``enable_thinking``.
            tool_choice: "none", "auto", "required" or one function, as in OpenAI's API.

        Raises:
            InvalidRequest: there is no template, it refuses the messages, or bad tools.
        """
        refuse(tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)
        tokenizer = self._text_side()
        conversations: list[Any] = (
            [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        )
        params = self._params_for(conversations, sampling_params)
        declared = declared_tools(tools)
        functions = declared.functions
        rules = AnswerRules(functions, read_tool_choice(tool_choice, functions))
        template = chat_template or self._chat_template
        formats = self._formats
        if chat_template is not None or chat_template_content_format != "auto":
            formats = self._detect(tokenizer, template, content_format=chat_template_content_format)
        render = partial(
            render_prompt,
            tokenizer,
            formats=formats,
            tools=declared.shown,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=template,
            variables=chat_template_kwargs,
        )
        prompts = [self._media.chat(render, said, self._engine.info) for said in conversations]
        plans = [
            self._plan(param, rules, prompt.opening, count_calls(conversation), formats)
            for param, prompt, conversation in zip(params, prompts, conversations, strict=True)
        ]
        written = [_written(place, prompt, tokenizer) for place, prompt in enumerate(prompts)]
        ids = [prompt.ids for prompt in prompts]
        prepared = self._prepare(written, ids, params, plans, lora_request, priority)
        return self._complete(prepared, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PooledRequest]:
        """Embeds the prompts in one batch; ``outputs.embedding`` is a list of floats.

        Args:
            pooling_params: one for all prompts or one for each.
            truncate_prompt_tokens: over that of ``pooling_params``.

        Raises:
            InvalidRequest: a prompt does not fit, or the model does not embed.
        """
        refuse(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        params = cut_to(pooling_params, truncate_prompt_tokens)
        return in_groups(
            list_texts(prompts), params, partial(self._pooling.embed, use_tqdm=use_tqdm)
        )

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PooledRequest]:
        """Returns the probabilities of the model's labels, as ``outputs.probs``.

        Raises:
            InvalidRequest: a prompt does not fit, or the model does not classify.
        """
        refuse(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        run = partial(self._pooling.classify, use_tqdm=use_tqdm)
        return in_groups(list_texts(prompts), cut_to(pooling_params), run)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        pooling_task: PoolingTask | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PooledRequest]:
        """Returns what the model pools, as arrays ``outputs.data``: [D], or [tokens, D].

        Args:
            pooling_task: embed, classify, token_embed or token_classify; None: the model's.

        Raises:
            InvalidRequest: a prompt does not fit, or the model generates.
        """
        refuse(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        params = cut_to(pooling_params, truncate_prompt_tokens)
        run = partial(self._pooling.encode, task=pooling_task, use_tqdm=use_tqdm)
        return in_groups(list_texts(prompts), params, run)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[PooledRequest]:
        """Scores pairs: one text with each of several, or as many of both (``outputs.score``).

        Raises:
            InvalidRequest: a text does not fit, or the model gives a pair no one number.
        """
        refuse(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        refuse(chat_template=chat_template)
        params = cut_to(pooling_params, truncate_prompt_tokens)
        return self._pooling.score(text_1, text_2, params, use_tqdm)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        top_n: int | None = None,
        use_tqdm: UseTqdm = True,
    ) -> list[tuple[int, float]]:
        """Returns (place, score) of the documents, the best first; ties are in their order.

        Raises:
            InvalidRequest: as :meth:`score`.
        """
        outputs = self.score(query, documents, pooling_params, use_tqdm=use_tqdm)
        scores = [one.outputs.score for one in outputs if isinstance(one.outputs, ScoringOutput)]
        return [(place, scores[place]) for place in ranked(scores, top_n)]

    def __getattr__(self, name: str) -> Any:
        """Says what is near an attribute of vLLM's that is missing here."""
        raise no_attribute(name)

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

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Removes all cached prefixes; returns True, for between calls no request holds one.

        Args:
            reset_running_requests, reset_connector: vLLM's, without effect: there are none.
        """
        self._engine.carry_out(Command.RESET_CACHE)
        return True

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Frees the memory of the KV cache; cached prefixes are lost.

        Args:
            level: 0 and 1 keep the weights. 2 drops them; they are loaded when it wakes.
            mode: vLLM's, without effect: between calls no request runs.

        Raises:
            InvalidRequest: another level.
        """
        self._engine.carry_out(sleep_command(level))
        self._asleep = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocates the KV cache again.

        Args:
            tags: vLLM's. "weights" alone loads the weights after a sleep of level 2.
        """
        if tags is not None and "kv_cache" not in tags:
            self._engine.carry_out(Command.LOAD)
        else:
            self._engine.carry_out(Command.WAKE)
            self._asleep = False

    def update_weights(
        self,
        weights: Any,
        version: str = "",
        *,
        partial: bool = False,
        dtype: Literal["bfloat16", "float16", "float32"] | None = None,
        target: Literal["model", "draft"] = "model",
    ) -> dict[str, Any]:
        """Computes by other weights from now on, as if the model had been loaded with them.

        Args:
            weights: a folder or file of safetensors, or tensors by name (``named_parameters()``).
            version: its name, for outputs; its number if empty.
            partial: tensors that are left out stay as they are.
            dtype: "bfloat16", "float16" or "float32", which tensors are rounded to.
            target: "draft" if they are those of the draft model or head, by its own names.

        Returns:
            serial, version, digest; how ("in place", or "restart" where a model is loaded anew);
            kept: names of the model's files that were left out, such as layers that draft.

        Raises:
            InvalidRequest: the tensors are not those of this model; the message names one, and
                nothing has changed.
            StorageFull: there is no room for them.
        """
        options = UpdateOptions(partial=partial, dtype=dtype, target=target)
        return self._engine.update_weights(weights, version, options)

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

    def _tokens(self, prompt: WrittenPrompt, special: bool = True) -> list[int]:
        return self._media.tokens(prompt, self._tokenizer, self._engine.info.max_model_len, special)

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
        priority: Sequence[int] | None = None,
    ) -> list[PreparedPrompt]:
        """Builds the engine requests of prompts; none runs yet."""
        prepared: list[PreparedPrompt] = []
        loras = loras_of(lora_request, len(prompts))
        parts = parts_of(loras)
        priorities = priorities_of(priority, len(prompts))
        for place, (prompt, ids, param) in enumerate(zip(prompts, tokens, params, strict=True)):
            request_id, plan = str(next(self._request_numbers)), plans[place]
            requests = self._build(
                *(prompt, ids, candidates(param), request_id, plan.guidance),
                *(priorities[place], parts[place]),
            )
            if len(requests) > param.n:
                request_logprobs(requests)
            shown = self._media.shown(requests[0].prompt)
            text = prompt.text or prompt.shown
            result = RequestOutput(request_id, text, shown, [], lora_request=loras[place])
            choices = []
            for request in requests:
                choice = OfflineChoice(request, param, self._tokenizer, result, plan)
                choices.append(choice)
                result.outputs.append(choice.output)
            prepared.append(PreparedPrompt(result, choices, param))
        return prepared

    def _complete(
        self, prepared: Sequence[PreparedPrompt], use_tqdm: UseTqdm
    ) -> list[RequestOutput]:
        """Runs prepared prompts; outputs are in their order."""
        if self._asleep:
            raise InvalidRequest("the engine sleeps: call wake_up() first", "prompt")
        choices = {choice.request.key: choice for each in prepared for choice in each.choices}
        with progress(use_tqdm, len(choices), "Processed prompts") as bar:
            self._drive(choices, bar)
        return [each.finished() for each in prepared]

    def _build(
        self,
        prompt: WrittenPrompt,
        ids: list[int],
        params: SamplingParams,
        request_id: str,
        guidance: Guidance | None,
        priority: int,
        parts: Sequence[RequestPart],
    ) -> list[EngineRequest]:
        info = self._engine.info
        return build_requests(
            truncated(ids, params, info.max_model_len, uncut=prompt.uncut),
            params,
            info,
            request_id=request_id,
            eos_token_ids=self._ends,
            priority=priority,
            arrival=time.monotonic(),
            param=prompt.param,
            tokenizer=self._tokenizer,
            cache_salt=prompt.cache_salt,
            guidance=guidance,
            images=prompt.images,
            embeds=self._media.embeds(prompt, info, params),
            parts=parts,
        )

    def _plan(
        self,
        params: SamplingParams,
        rules: AnswerRules | None = None,
        opening: str = "",
        earlier_calls: int = 0,
        formats: Detected | None = None,
    ) -> OutputPlan:
        """How outputs are guided and read; grammars are compiled once, in this process.

        Args:
            rules: of a chat, with its formats; None for plain completions.
        """
        if params.structured_outputs is None and rules is None:
            return NO_PLAN
        formats = formats or Detected()
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
            for ended in message.ended:
                if ended.error is not None:
                    choices[ended.key].name_cause(ended.error)
                    raise ended.error
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


def _written(place: int, prompt: ChatPrompt, tokenizer: Tokenizer) -> WrittenPrompt:
    """A conversation's prompt, with its text for its output."""
    return WrittenPrompt(
        f"messages[{place}]",
        None if prompt.embeds else tokenizer.decode(prompt.ids, False),
        images=prompt.images,
        embeds=prompt.embeds,
    )
