"""Everything that happens on a device happens here: load, profile, execute one step at a time."""

import logging
import os
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from rayfin.actors import failpoints
from rayfin.actors.config import (
    BatchLimits,
    EngineArgs,
    EngineConfig,
    ModelFacts,
    Quantization,
    resolve_limits,
    resolve_model_len,
)
from rayfin.actors.errors import EngineUnavailable, Fenced, InvalidConfig, UnsupportedModel
from rayfin.actors.messages import NO_TOKEN, Logprobs, SchedulerInfo, StepResult
from rayfin.actors.runner.cpu.decoder import TOLERANCE, CpuDecoder, build_cpu_decoder
from rayfin.actors.runner.cpu.packed_layers import pack_linears
from rayfin.actors.runner.failed_rows import is_out_of_memory, isolate
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel, StepModel
from rayfin.actors.runner.models.weights import load_config, load_model, max_position, page_type
from rayfin.actors.runner.parallel.groups import ProcessGroups
from rayfin.actors.runner.parallel.pipeline import PipelineTokenChannel
from rayfin.actors.runner.parallel.rank import ParallelRank
from rayfin.actors.runner.parallel.shard_weights import load_share
from rayfin.actors.runner.sampling.sampler import Sampled, Sampler
from rayfin.actors.runner.step.batch import build_inputs, next_step_info
from rayfin.actors.runner.step.memory import available_bytes, bytes_taken, largest_step
from rayfin.actors.runner.step.page_checksums import PageChecksums
from rayfin.actors.runner.step.page_moves import PageMover
from rayfin.actors.runner.step.page_prefaulter import PagePrefaulter
from rayfin.actors.runner.step.request_slots import RequestSlots
from rayfin.actors.timing import MODEL_LOAD_SECONDS
from rayfin.cache.kv_tensors import KVTensors, page_bytes
from rayfin.kernels.attention.select import select_attention
from rayfin.kernels.cpu.kernels import CpuKernels, try_kernels
from rayfin.kernels.cpu.library import try_load
from rayfin.kernels.sampling.select import select_sample
from rayfin.kernels.shapes import PagedAttention
from rayfin.kernels.triton.available import can_use_triton

if TYPE_CHECKING:
    from rayfin.actors.runner.gpu.decoder import GpuDecoder
    from rayfin.actors.runner.gpu.graphs import DecodeGraphs, MultiStepOutput

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Steps in a row of which no row could be computed: then it is the runner, which is replaced."""

AHEAD_TOKENS = 16_384
AHEAD_BYTES = 1 << 30
"""Pages for so many tokens, and no more memory, are made ready on a CPU before they are used."""

ONE_THREAD_PARAMETERS = 32_000_000
"""Models with fewer parameters compute on one thread unless told otherwise."""


class ModelRunner:
    """One device's model, or its share of one, pages and requests. A plain class; the actor around
    it adds nothing. ``place`` is that of a rank among several, which get the same calls.

    Life: construct (weights), ``profile`` (facts for ``resolve``), ``start`` (pages), ``execute``;
    ``sleep`` and another ``start`` between two steps.
    """

    def __init__(self, args: EngineArgs, place: ParallelRank | None = None) -> None:
        self._args = args
        self._device = pick_device(args.device)
        self._ranks = 1 if place is None else place.size
        if args.quantization:
            _require_quantisable(args, self._device, self._ranks)
        self._hf_config = load_config(args)
        self._peers = None if place is None else ProcessGroups(place, self._device)
        model, layers = self._load()
        kernels: CpuKernels | None = None
        if self._device.type == "cpu":
            threads = args.threads or default_threads(model.num_parameters(), self._ranks)
            torch.set_num_threads(threads)
            kernels = try_kernels(threads) if args.attention in ("auto", "cpu") else None
        try:
            kernel = select_attention(self._device, model.dtype, args.attention, kernels)
        except ValueError as error:
            raise InvalidConfig(str(error), "attention") from None
        self._page_type = page_type(args.kv_cache_dtype, model.dtype, kernel)
        paged = PagedModel(model, kernel, layers)
        self._model: StepModel = paged
        self._gpu_model: GpuDecoder | None = None
        if args.attention in ("auto", "triton") and can_use_triton(self._device):
            self._on_triton(paged, kernel)
        elif self._peers and kernels and model.dtype in TOLERANCE:
            pack_linears(paged, kernels)
        if not self._peers and kernels and model.dtype in TOLERANCE:
            self._model = self._on_kernels(paged, kernels, args.quantization)
        self._kernels = kernels
        self._page_size = args.page_size
        self._epoch = -1
        self._next_step = 0
        self._failed_steps = 0  # in a row, of which no row could be computed
        self._graphs: DecodeGraphs | None = None
        self._relay: PipelineTokenChannel | None = None  # in a group
        self._first_touch: PagePrefaulter | None = None  # on a CPU, with pages
        self._page_sums: PageChecksums | None = None  # where pages are checked

    def _load(self) -> tuple[PreTrainedModel, range | None]:
        """The model, or this rank's share of it, and which layers that has."""
        args, config, device = self._args, self._hf_config, self._device
        if self._peers is None:
            return load_model(args, config, device, ATTENTION), None
        model = load_share(args, config, device, ATTENTION, self._peers)
        self._peers.connect("load", MODEL_LOAD_SECONDS)
        total = config.get_text_config(decoder=True).num_hidden_layers
        return model, self._peers.place.layers(total)

    def _on_triton(self, paged: PagedModel, attention: PagedAttention) -> None:
        """The model's experts on Triton's kernels, and all of it if it is one device's alone."""
        from rayfin.actors.runner.gpu.decoder import build_gpu_decoder
        from rayfin.actors.runner.gpu.experts import group_experts  # Triton is not everywhere

        group_experts(paged)
        if self._peers is None:
            self._gpu_model = build_gpu_decoder(paged, attention)
            self._model = self._gpu_model or paged

    @staticmethod
    def _on_kernels(
        paged: PagedModel, kernels: CpuKernels, quantization: Quantization | None
    ) -> PagedModel | CpuDecoder:
        """The model with all of it, or its linear layers, on compiled kernels."""
        if fused := build_cpu_decoder(paged, kernels, quantization):
            torch.set_num_threads(1)  # what is left to torch is small, its threads in the way
            return fused
        packed = pack_linears(paged, kernels, quantization)
        if quantization and not packed:
            name = type(paged.transformer).__name__
            raise UnsupportedModel(
                f"{name} cannot be quantised: it reads its weights for itself", "quantization"
            )
        return paged

    def profile(self) -> tuple[ModelFacts, BatchLimits]:
        """What the model and the device say; runs the largest step unless memory was given."""
        args, config = self._args, self._hf_config
        positions = max_position(config)
        model_len = resolve_model_len(args, positions)
        limits = resolve_limits(args, self._device.type, model_len)
        available = args.kv_cache_memory
        if available is None:
            available = available_bytes(
                lambda: self._run_largest_step(limits, model_len),
                self._device,
                args.memory_utilization,
                self._ranks,
            ) - self._bytes_of_graphs(limits, model_len)
        facts = ModelFacts(
            architecture=(config.architectures or [type(config).__name__])[0],
            vocab_size=config.get_text_config(decoder=True).vocab_size,
            max_position=positions,
            page_bytes=page_bytes(self._model.layouts, args.page_size, self._page_type),
            available_bytes=available,
        )
        return facts, limits

    def start(self, config: EngineConfig, epoch: int) -> None:
        """Allocates the pages; steps of ``epoch`` may come.

        Raises:
            PeerLost: another rank of the group does not start.
        """
        self._graphs = self._page_sums = None
        self._bind(0)  # a restart frees the old pages before it takes new ones
        self._slots = RequestSlots(config.limits.max_decoding_batch, config.max_pages_per_request)
        sample = select_sample(self._device, self._args.attention, self._kernels)
        self._sampler = Sampler(self._slots, self._device, sample)
        cache = self._bind(config.num_pages)
        self._mover = PageMover(cache, self._host(config.num_host_pages))
        self._touch_ahead(cache)
        self._page_sums = PageChecksums(cache, self._page_size) if self._args.check_pages else None
        rows, pages = config.limits.max_decoding_batch, config.max_pages_per_request
        self._graphs = self._decode_graphs(self._slots, rows, pages)
        if self._peers:
            self._peers.connect(str(epoch))
            self._relay = PipelineTokenChannel(self._peers, self._slots, self._sampler, config)
        self._epoch = epoch
        self._next_step = 0

    def sleep(self) -> None:
        """Gives the pages' memory back; no step may come before the next ``start``."""
        self._graphs = self._page_sums = None
        self._mover = PageMover(self._bind(0), self._host(0))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def execute(self, info: SchedulerInfo) -> StepResult:
        """Runs one step: moves pages, takes in its news, computes, samples.

        Raises:
            Fenced: the step is of an epoch that is over.
            EngineUnavailable: it is of another epoch, or not the next one.
            PageCorrupted: with ``check_pages``, before a request reads such a page.
        """
        if info.epoch < self._epoch:
            raise Fenced(f"step {info.epoch}.{info.step} refused: this runner is at {self._epoch}")
        if (info.epoch, info.step) != (self._epoch, self._next_step):
            raise EngineUnavailable(
                f"step {info.epoch}.{info.step} refused: this runner is at "
                f"{self._epoch}.{self._next_step}"
            )
        started = time.perf_counter()
        if len(info.moves):
            self._mover.run(info.moves)
            if self._page_sums:
                self._page_sums.moved(info.moves)
        self._slots.apply(info)
        if self._page_sums:
            self._page_sums.check(info, self._slots)
        if self._first_touch and len(info.new_pages):
            self._first_touch.reach(int(info.new_pages.max()))
        self._sampler.apply_diff(info)
        num_steps, rows = info.num_steps, np.arange(len(info.ids))
        replayed = self._replay(info)
        tokens = np.full((len(rows), num_steps), NO_TOKEN, np.int32)
        result = StepResult(info.epoch, info.step, tokens)
        logprobs: list[Logprobs] = []
        for column in range(num_steps):
            if replayed is None:
                sampled = self._advance(info, result)
            else:
                sampled = self._sampler.replayed(
                    info, replayed.tokens[column, rows], replayed.logprobs(column, rows)
                )
                self._slots.remember(info, sampled.tokens)
            if self._page_sums:
                self._page_sums.filled(info, self._slots)
            tokens[rows, column] = sampled.tokens
            result.errors |= {int(rows[row]): error for row, error in sampled.errors.items()}
            result.prompt_logprobs |= sampled.prompt_logprobs  # only where rows are still all
            if sampled.logprobs is not None:
                logprobs.append(sampled.logprobs.renumbered(rows * num_steps + column))
            if column + 1 == num_steps:
                break
            still_decoding = self._slots.still_decoding(info, sampled.tokens)
            rows, info = rows[still_decoding], next_step_info(info, still_decoding)
            if not len(rows):
                break
        if logprobs:
            result.logprobs = Logprobs.joined(logprobs)
        if self._peers:
            self._peers.agree(self._next_step)
        self._next_step += 1
        result.seconds = time.perf_counter() - started
        return result

    def _replay(self, info: SchedulerInfo) -> "MultiStepOutput | None":
        """What a lease gives that CUDA graphs can run, else None."""
        if self._graphs is None or failpoints.ACTIVE:
            return None
        rules = self._sampler.row_token_rules(info)
        if not self._graphs.supports(info, rules):
            return None
        try:
            return self._graphs.run(info, rules)
        except RuntimeError as error:  # step by step it is found out whose fault it is
            self._leave_broken_device(error)
            logger.exception("a lease failed as a graph: it runs step by step")
            return None

    def _advance(self, info: SchedulerInfo, result: StepResult) -> Sampled:
        """One forward, and one token for each row that samples; a row at fault fails alone.

        Raises:
            Exception: the model's own; a step of several rows fails as a whole, or steps of one row
                have failed again and again: it is not the requests' fault.
        """
        try:
            return self._compute(info)
        except Exception as error:
            if self._peers:  # the others are in the midst of it: nobody can begin again alone
                raise
            self._leave_broken_device(error)
            result.out_of_memory |= is_out_of_memory(error)
            self._failed_steps += 1
            if self._failed_steps > MAX_FAILED_STEPS:
                raise
            sampled = isolate(self._compute, info, error)
            if len(sampled.errors) < len(info.ids):
                self._failed_steps = 0
            return sampled

    def _leave_broken_device(self, error: Exception) -> None:
        """After some errors a CUDA context fails every call: only a new process helps."""
        if self._device.type != "cuda" or is_out_of_memory(error):
            return
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            logger.exception("the device is broken: this runner exits")
            os._exit(1)

    @torch.inference_mode()
    def _compute(self, info: SchedulerInfo) -> Sampled:
        if self._relay:
            self._relay.before(info)
        inputs = build_inputs(info, self._slots, self._page_size, self._device)
        wanted = self._sampler.wanted(info, inputs)
        spoiled = _planted(info) if failpoints.ACTIVE else []
        logits = self._model.forward(inputs.input_ids, inputs.batch, wanted)
        if self._peers and info.num_steps == 1:  # while tokens are sampled
            self._peers.begin_agreement(info.step)
        if spoiled:
            logits[np.isin(inputs.sampled_rows, spoiled).nonzero()[0]] = torch.nan
        sampled = (self._relay or self._sampler).sample(info, inputs, logits)
        self._slots.remember(info, sampled.tokens)
        return sampled

    def _decode_graphs(
        self, slots: RequestSlots, rows: int, pages_per_request: int
    ) -> "DecodeGraphs | None":
        if self._gpu_model is None or self._args.enforce_eager:
            return None
        from rayfin.actors.runner.gpu.graphs import DecodeGraphs

        return DecodeGraphs(
            self._gpu_model,
            slots,
            rows=rows,
            pages_per_request=pages_per_request,
            page_size=self._page_size,
            max_num_steps=self._args.max_lease,
            device=self._device,
        )

    def _bytes_of_graphs(self, limits: BatchLimits, model_len: int) -> int:
        """What recorded steps will take beside the pages: they are recorded once for that."""
        rows, pages = limits.max_decoding_batch, -(-model_len // self._page_size)
        self._bind(1)  # the only one that their rows, of no request, look at
        slots = RequestSlots(rows, pages)
        taken = bytes_taken(lambda: self._decode_graphs(slots, rows, pages), self._device)
        self._bind(0)
        return taken

    def _run_largest_step(self, limits: BatchLimits, model_len: int) -> int:
        """The costliest step there is; the bytes of its own pages, which are freed afterwards."""
        info, pages = largest_step(limits, self._args.page_size, model_len)
        model, rows = self._model, limits.max_decoding_batch
        slots = RequestSlots(rows, int(pages.max()))
        slots.apply(info)
        self._bind(len(info.new_pages))
        inputs = build_inputs(info, slots, self._page_size, self._device)
        inputs.sampled = inputs.sampled.repeat(rows)[:rows]
        logits = model.forward(inputs.input_ids, inputs.batch, inputs.sampled)
        logits.to(torch.float32, copy=True)  # as for requests whose logits are changed
        self._bind(0)
        return len(info.new_pages) * page_bytes(model.layouts, self._page_size, self._page_type)

    def _bind(self, num_pages: int) -> KVTensors:
        model = self._model
        if self._first_touch:
            self._first_touch.stop()
            self._first_touch = None
        cache = KVTensors(model.layouts, num_pages, self._page_size, self._page_type, self._device)
        model.bind(cache)
        return cache

    def _touch_ahead(self, cache: KVTensors) -> None:
        """Has memory ready for the next requests' pages where the system gives it at first use."""
        if self._device.type != "cpu" or not cache.num_pages:
            return
        page = page_bytes(self._model.layouts, self._page_size, self._page_type)
        ahead = min(AHEAD_TOKENS // self._page_size, AHEAD_BYTES // max(page, 1))
        self._first_touch = PagePrefaulter([*cache.keys, *cache.values], ahead)

    def _host(self, num_pages: int) -> KVTensors:
        """Swap space: pages in host memory, pinned where a GPU copies to and from it."""
        model, host = self._model, torch.device("cpu")
        pinned = num_pages > 0 and self._device.type == "cuda"
        try:
            return KVTensors(
                model.layouts, num_pages, self._page_size, self._page_type, host, pinned=pinned
            )
        except (RuntimeError, MemoryError) as error:
            raise InvalidConfig(f"swap_space could not be taken: {error}", "swap_space") from None


def _planted(info: SchedulerInfo) -> list[int]:
    """What fault tests plant in rows of this forward: those whose logits are spoiled."""
    assert failpoints.ACTIVE is not None
    step = {"epoch": info.epoch, "step": info.step}
    return [
        row
        for row in range(len(info.ids))
        if failpoints.ACTIVE.hit("runner.row", **step, tokens=info.chunk_prompt(row)) == "nan"
    ]


def _require_quantisable(args: EngineArgs, device: torch.device, ranks: int = 1) -> None:
    """Refuses quantization where its kernels do not run; says why."""
    why = None
    if ranks > 1:
        why = "is for one device, not for several that share a model"
    elif device.type != "cpu":
        why = f"is for a CPU, and the device is {device.type!r}"
    elif args.attention not in ("auto", "cpu"):
        why = f"runs on the compiled CPU kernels, not with attention {args.attention!r}"
    elif args.dtype == "float16":
        why = "wants dtype float32 or bfloat16, not 'float16'"
    elif try_load() is None:
        why = "runs on the compiled CPU kernels, and they are not built"
    if why:
        raise InvalidConfig(f"quantization {args.quantization!r} {why}", "quantization")


def pick_device(name: str) -> torch.device:
    """The device of a flag's value.

    Raises:
        InvalidConfig: it asks for a GPU where there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("device 'cuda' asked for, and torch finds no GPU", "device")
    return torch.device(name)


def default_threads(parameters: int, ranks: int = 1) -> int:
    """Compute threads for a rank of a model on a CPU: its share of the usable cores, or one for a
    very small model.

    A step of a small model is over before its threads have found each other, and beside a busy
    HTTP process a thread that waits for a core holds up the others (docs/benchmarks/channel.md).
    """
    return max(usable_cores() // ranks, 1) if parameters >= ONE_THREAD_PARAMETERS else 1


def usable_cores() -> int:
    """Cores that this process may run on (a container's share, not the machine's)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
