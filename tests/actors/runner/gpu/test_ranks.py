"""Ranks on the GPU's path: their fused shares and their graphs, against one device.

Ranks are threads with real Gloo between them. Triton's interpreter runs one kernel at a time.
"""

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rank_groups import HOST, Group, run_group
from rayfin.actors.messages import Sampling, SchedulerInfo
from rayfin.actors.runner import checkpoint
from rayfin.actors.runner.models.config import load_config
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel
from rayfin.actors.runner.models.replace import probe_logits
from rayfin.actors.runner.parallel.groups import ProcessGroups, open_store
from rayfin.actors.runner.parallel.rank import ParallelRank
from rayfin.actors.runner.parallel.shard_weights import load_share
from rayfin.actors.scheduler.policy import multi_step
from rayfin.kernels.attention import select as attention_select
from rayfin.kernels.attention.torch_backend import paged_attention
from rayfin.kernels.sampling import select as sampling_select
from tiers import few

pytest.importorskip("triton")
from triton.runtime.interpreter import GridExecutor

from rayfin.actors.runner.gpu.decoder import GpuDecoder, build_gpu_decoder
from rayfin.actors.runner.gpu.experts import group_experts
from rayfin.actors.runner.gpu.graph_model import GraphModel, build_graph_model
from rayfin.actors.runner.gpu.graphs import DecodeGraphs
from rayfin.kernels.attention.triton_backend import TritonAttention

pytestmark = [
    pytest.mark.slow(reason="starts groups of two ranks, in Triton's interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are threads on a CPU"),
]

Make = Callable[..., Any]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, call = threading.RLock(), GridExecutor.__call__

    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return call(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", alone)


@pytest.fixture
def in_two_ranks(engine_args: Make) -> Make:
    """Runs a function of the share and its peers in each of two ranks of a model."""

    def run(tiny: Any, work: Callable[[PagedModel, ProcessGroups], Any]) -> list[Any]:
        store, args = open_store(), engine_args(tiny.folder)

        def rank(number: int) -> Any:
            peers = ProcessGroups(ParallelRank(number, 2, 1, (HOST, store.port), HOST), CPU)
            share = load_share(args, load_config(args), CPU, ATTENTION, peers)
            peers.connect("load", 60)
            return work(PagedModel(share, TritonAttention(CPU), range(9)), peers)

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(rank, range(2)))

    return run


@pytest.mark.parametrize("family", few(["qwen2", "glm4_moe", "mixtral", "gemma3_text"], 2))
def test_a_share_is_fused(family: str, tiny_model: Make, in_two_ranks: Make) -> None:
    """Biases, a module that sums, norms on both sides, experts that sum. The build compares its
    kernels of few rows and of many."""
    tiny = tiny_model(family)

    def logits(paged: PagedModel, peers: ProcessGroups) -> list[torch.Tensor]:
        group_experts(paged, all_agree=peers.all_agree)
        plain = probe_logits(paged, paged)
        fused = build_gpu_decoder(paged, TritonAttention(CPU), peers=peers)
        assert fused is not None and not fused.pdl
        return [plain, probe_logits(fused, paged)]

    one, other = in_two_ranks(tiny, logits)
    whole = PagedModel(copy.deepcopy(tiny.model), paged_attention)  # other tests have the model too
    expected = probe_logits(whole, whole)
    for given, same in zip(one, other, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(given, same)


@pytest.mark.parametrize("family", few(["gpt_oss", "olmo2"], 1))
def test_modules_of_a_rank_are_recorded(
    family: str, tiny_model: Make, in_two_ranks: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Where its share is not recognised: a bias behind the sum, norms over all ranks."""
    caplog.set_level(logging.INFO)

    def build(paged: PagedModel, peers: ProcessGroups) -> GraphModel | None:
        group_experts(paged, all_agree=peers.all_agree)
        assert build_gpu_decoder(paged, TritonAttention(CPU), peers=peers) is None
        return build_graph_model(paged, TritonAttention(CPU), peers=peers)

    assert None not in in_two_ranks(tiny_model(family), build)
    assert "are CUDA graphs of transformers' own modules" in caplog.text


def test_ranks_go_one_way(
    tiny_model: Make, in_two_ranks: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Where logits differ in one rank alone, none is replaced, and no sum is left over."""

    def build(paged: PagedModel, peers: ProcessGroups) -> GpuDecoder | None:
        def agree(yes: bool) -> bool:
            return all_agree(yes and peers.place.rank == 0)

        all_agree, peers.all_agree = peers.all_agree, agree  # type: ignore[method-assign]
        built = build_gpu_decoder(paged, TritonAttention(CPU), peers=peers)
        probe_logits(paged, paged)
        peers.agree(1)
        return built

    assert in_two_ranks(tiny_model("llama"), build) == [None, None]
    assert caplog.text.count("is not replaced: logits would differ") == 2


@dataclass
class _Step:
    """A step that all ranks have queued, if they can, and end when its result is asked for."""

    group: "QueuingGroup"
    info: SchedulerInfo

    def result(self) -> Any:
        execute = [runner.execute for runner in self.group.runners]
        return self.group._all(lambda run: run(self.info), execute)[0]


class QueuingGroup(Group):
    """Ranks that get a step before the one before has ended, as on a GPU."""

    def submit(self, info: SchedulerInfo) -> Any:
        self.steps.append(info)
        self.queued = self._all(lambda runner: runner.begin(info), self.runners)
        assert len(set(self.queued)) == 1
        self.ahead = getattr(self, "ahead", 0) + self.queued[0]
        return _Step(self, info)


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checkpoint, attention_select, sampling_select):
        monkeypatch.setattr(module, "can_use_triton", lambda device: True)
    monkeypatch.setattr(multi_step, "CALL_SECONDS", 1e6)


def test_two_ranks_with_graphs(
    two_layers: Any,
    served: Make,
    engine_args: Make,
    request_of: Make,
    on_triton: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in chunks, leases, queued steps, log probabilities: tokens and numbers of one rank.

    Ranks that start anew connect anew, and their graphs with them.
    """
    sizes: list[Sequence[Any]] = []
    begin = DecodeGraphs.begin

    def begun(self: DecodeGraphs, info: SchedulerInfo, rules: Any) -> None:
        sizes.append((info.num_steps, info.prefill_batch))
        begin(self, info, rules)

    monkeypatch.setattr(DecodeGraphs, "begin", begun)
    settings = {"max_lease": 3, "max_decoding_batch": 2}
    samplings = [Sampling(), Sampling(temperature=0.9, seed=3, logprobs=2)]
    requests = [
        request_of(key, list(range(3, 3 + length)), 5 + 2 * key, sampling=samplings[key])
        for key, length in enumerate((30, 2))
    ]
    alone = served(two_layers.folder, attention="torch", **settings)
    expected = alone.run(*requests)
    args = engine_args(two_layers.folder, attention="triton", **settings)
    group = QueuingGroup(args, 2, 1)
    try:
        graphs = [runner._graphs for runner in group.runners]
        for runner in group.runners:
            assert isinstance(runner._loaded.gpu_model, GpuDecoder)
            assert runner._model is runner._loaded.gpu_model
        tokens, logprobs, _ = run_group(group, requests)
        assert tokens == expected
        assert logprobs[1] == pytest.approx([one[0] for one in alone.logprobs[1]], abs=1e-4)
        assert max(steps for steps, _ in sizes) > 1 and max(prompts for _, prompts in sizes) > 0
        group.restart()
        tokens, _, _ = run_group(group, [request_of(0, list(range(3, 33)), 5)])
        assert tokens[0] == expected[0] and group.ahead
        for runner, before in zip(group.runners, graphs, strict=True):
            assert runner._graphs is not None and runner._graphs is not before
    finally:
        group.close()
