"""vLLM's own scheduler under the cases of ``core_subjects``; runs in vLLM's environment.

Reads one case a line (JSON) from stdin, answers each with one line of JSON on stdout. It is driven
as vLLM's engine core drives it: ``schedule``, a model that answers at once, ``update_from_output``;
two batches in the queue and the AsyncScheduler where ``in_flight`` is 2. Statistics are off.
"""

import gc
import json
import os
import random
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

PAGE_SIZE = 16
TOKEN = 7
WARM_STEPS = 32
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
}


class Peer:
    """One scheduler of vLLM, as ``EngineCore`` sets it up, and a model that answers at once."""

    def __init__(self, case: dict[str, Any], model: str) -> None:
        in_flight, caching = case["in_flight"], case["prefix_caching"]
        config = VllmConfig(
            model_config=ModelConfig(model=model, skip_tokenizer_init=True, max_model_len=4096),
            cache_config=CacheConfig(block_size=PAGE_SIZE, enable_prefix_caching=caching),
            scheduler_config=SchedulerConfig(
                max_num_seqs=case["max_running"],
                max_num_batched_tokens=8192,
                max_model_len=4096,
                is_encoder_decoder=False,
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
        )
        config.scheduler_config.async_scheduling = in_flight > 1  # off on a CPU, on with a GPU
        config.cache_config.num_gpu_blocks = case["num_pages"] + 1  # one is vLLM's null block
        spec = FullAttentionSpec(
            block_size=PAGE_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        caches = KVCacheConfig(
            num_blocks=case["num_pages"] + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=PAGE_SIZE,
            log_stats=False,
        )
        self.scheduler.use_v2_model_runner = True  # as on a GPU: it is sent less per step
        self.in_flight = in_flight
        self._queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._hasher = None
        self.rows: deque[int] = deque(maxlen=case.get("steps"))  # of the last steps
        if caching:
            hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_function)
            self._hasher = get_request_block_hasher(PAGE_SIZE, hash_function)

    def add(self, name: int, prompt: list[int], max_tokens: int) -> float:
        """Adds a request named by a number; returns the seconds of ``add_request``."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=[2])
        params.update_from_generation_config({}, 2)
        started = time.perf_counter()
        request = Request(
            request_id=str(name),
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return time.perf_counter() - started

    def abort(self, name: int) -> float:
        started = time.perf_counter()
        self.scheduler.finish_requests([str(name)], RequestStatus.FINISHED_ABORTED)
        return time.perf_counter() - started

    def step(self) -> tuple[float, float]:
        """CPU seconds in ``schedule`` and ``update_from_output``; the model's are not counted."""
        scheduling = 0.0
        while len(self._queue) < self.in_flight:
            started = time.thread_time()
            output = self.scheduler.schedule()
            scheduling += time.thread_time() - started
            self._queue.append((output, self._run(output)))
        output, result = self._queue.popleft()
        started = time.thread_time()
        self.scheduler.update_from_output(output, result)
        return scheduling, time.thread_time() - started

    @property
    def is_decoding(self) -> bool:
        """Whether requests run and none is in its prompt."""
        running = self.scheduler.running
        return bool(running) and not any(request.is_prefill_chunk for request in running)

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        self.rows.append(len(names))
        requests = self.scheduler.requests
        tokens = [[] if requests[name].is_prefill_chunk else [TOKEN] for name in names]
        return ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, tokens)


def steps_case(case: dict[str, Any], model: str) -> dict[str, Any]:
    """Steady steps of ``case``: seconds each."""
    peer = Peer(case, model)
    for name, (prompt, max_tokens) in enumerate(zip(case["prompts"], case["outputs"], strict=True)):
        peer.add(name, prompt, max_tokens)
    while len(peer.scheduler.running) < case["running"] or not (peer.is_decoding or case["churn"]):
        peer.step()
    for _ in range(WARM_STEPS):
        peer.step()
    gc.freeze()
    times = [peer.step() for _ in range(case["steps"])]
    gc.unfreeze()
    assert case["churn"] or set(peer.rows) == {case["running"]}, "some request was not in a step"
    return {
        "schedule": [schedule for schedule, _ in times],
        "update": [update for _, update in times],
        "running": len(peer.scheduler.running),
        "waiting": len(peer.scheduler.waiting),
    }


def queue_case(case: dict[str, Any], model: str) -> dict[str, Any]:
    """Seconds of each ``add`` behind ``queued`` waiting requests, and of each ``abort`` of one."""
    peer = Peer(case, model)
    prompts, queued, calls = case["prompts"], case["queued"], case["calls"]
    for name in range(queued):
        peer.add(name, prompts[name % len(prompts)], 100)
    gc.freeze()
    names = range(queued, queued + calls)
    adds = [peer.add(name, prompts[name % len(prompts)], 100) for name in names]
    aborts = [peer.abort(name) for name in random.Random(0).sample(range(queued + calls), calls)]
    gc.unfreeze()
    return {"add": adds, "abort": aborts, "waiting": len(peer.scheduler.waiting)}


def serve(answers: TextIO) -> None:
    """Answers cases until stdin ends; the first line is the version."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
        kinds = {"steps": steps_case, "queue": queue_case}
        for line in sys.stdin:
            case = json.loads(line)
            print(json.dumps(kinds[case["kind"]](case, folder)), file=answers, flush=True)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    serve(answers)
