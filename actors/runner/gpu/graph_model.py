"""transformers' own modules over pages, as graphs: what `DecodeGraphs` uses of a decoder.

A model that is not recognised as a `GpuDecoder` launches some 30 kernels a layer, and the host
takes longer to launch them than a device to compute a few tokens. Recorded they cost their own time
alone. Nothing is assumed of a model: a forward under `NoSyncs` shows whether it waits for the
device, and then the recorded layers have to give the logits that they give one by one.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from rayfin.actors.errors import PeerLost, UnrecognizedModule
from rayfin.actors.runner.batch import STATES, StepInputs
from rayfin.actors.runner.gpu.decoder import recorded_sums
from rayfin.actors.runner.gpu.experts import TOLERANCE, padding_of
from rayfin.actors.runner.gpu.graphs import CudaRecorder
from rayfin.actors.runner.gpu.prompt_graphs import PromptGraphs, Record
from rayfin.actors.runner.models.paged_model import PagedModel
from rayfin.actors.runner.models.replace import PROBE_PAGE_SIZE, PROBE_TOKENS, verified_replacement
from rayfin.actors.runner.models.step_model import HookedStates
from rayfin.actors.runner.parallel.groups import ProcessGroups
from rayfin.actors.runner.state_tensors import StateTensors
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.kernels.attention.triton_backend import LAUNCHES, Launch, Sizes
from rayfin.kernels.shapes import PagedAttention, PagedBatch

logger = logging.getLogger(__name__)

WAITS = frozenset(
    (
        "aten::_local_scalar_dense",
        "aten::item",
        "aten::nonzero",
        "aten::masked_select",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::unique_consecutive",
        "aten::bincount",
        "aten::is_nonzero",
        "aten::equal",
        "aten::repeat_interleave.Tensor",
        "aten::repeat_interleave.self_Tensor",
        "aten::where",
        "aten::nonzero_numpy",
        "aten::argwhere",
    )
)
"""Operations whose result, or its shape, the host has to read."""


class NoSyncs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what waits for the device, and what no graph can repeat.

    Raises:
        UnrecognizedModule: an operation of the work is such a one.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name()
        indices = args[1] if name.startswith(("aten::index.", "aten::index_put")) else ()
        masks = any(
            isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
            for each in indices
        )
        if name in WAITS or masks:
            raise UnrecognizedModule(f"its forward waits for the device ({name})")
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in (*args, out) if isinstance(each, torch.Tensor)]
        if len({each.device.type for each in tensors if each.dim()}) > 1:
            raise UnrecognizedModule("its forward copies between host and device")
        return out


class GraphModel:
    """A ``StepModel`` of transformers' modules, whose layers and head can be recorded.

    Args:
        attention: that of ``paged``, or what that asks for rows which see no later ones.
        peers: of a rank, whose modules sum over all of them.
    """

    def __init__(
        self, paged: PagedModel, attention: PagedAttention, peers: ProcessGroups | None = None
    ) -> None:
        self._paged = paged
        self._peers = peers
        self._padding = padding_of(paged.transformer)
        self.attention = attention
        self.replay: Callable[[StepInputs], torch.Tensor | None] | None = None
        """What the layers of a step give by a graph, or None if none holds it."""
        self._sizes: list[Sizes] = []
        self.hooked: list[HookedStates] = []  # what heads that draft read of a step
        self._states: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """What hooks had kept when layers gave a tensor, by that tensor: graphs give it again."""

    @property
    def layouts(self) -> list[KVLayout]:
        return self._paged.layouts

    @property
    def dtype(self) -> torch.dtype:
        return self._paged.dtype

    @property
    def states(self) -> StateTensors | None:
        recurrent = self._paged.recurrent
        return None if recurrent is None else recurrent.states

    @property
    def transformer(self) -> PreTrainedModel:
        return self._paged.transformer

    @property
    def hidden_size(self) -> int:
        """Returns the numbers of a row of hidden states."""
        size: int = self._paged.transformer.config.get_text_config(decoder=True).hidden_size
        return size

    def attention_sizes(self) -> list[Sizes]:
        """Returns the sizes of its layers' attention, each once."""
        return self._sizes

    def starts_early(self, rows: int) -> bool:
        """Returns False: the kernels between those of attention are torch's."""
        return False

    def bind(self, cache: KVTensors) -> None:
        """Makes the layers keep their keys and values in ``cache``. What was recorded is over."""
        self.replay = None
        self._paged.bind(cache)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Returns logits [S, V] of the tokens at ``inputs.sampled``; all T go into the cache."""
        states = None if self.replay is None else self.replay(inputs)
        if states is not None and self.hooked:
            count = len(inputs.input_ids)
            for hooked, kept in zip(self.hooked, self._states[states], strict=True):
                hooked.kept = {place: tensor[:count] for place, tensor in kept.items()}
        return (
            self._paged.forward(inputs) if states is None else self.logits(states, inputs.sampled)
        )

    def stream(self, input_ids: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Returns hidden states [T, hidden] behind the layers; the cache gets all T tokens."""
        with self._padding.of(batch), recorded_sums(self._peers, batch):
            states = self._paged.run_layers(input_ids, batch)
        if self.hooked:
            self._states[states] = [dict(hooked.kept) for hooked in self.hooked]
        return states

    def logits(self, stream: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """Returns the logits [S, V] of the rows ``sampled`` [S] of hidden states [T, hidden]."""
        return self._paged.run_head(stream.index_select(0, sampled))

    def observe(self) -> None:
        """Runs a token's layers and head without attention, to see what they ask for.

        Raises:
            UnrecognizedModule: they cannot be recorded.
        """
        seen: dict[Sizes, None] = {}

        def launches(_: PagedAttention, __: PagedBatch, sizes: Sizes) -> list[Launch]:
            seen[sizes] = None
            return []

        device, recurrent = self._paged.device, self._paged.recurrent
        tokens, row = torch.zeros(2, 1, dtype=torch.int64, device=device)
        batch = PagedBatch(
            query_start=torch.arange(2, dtype=torch.int32, device=device),
            kv_len=torch.ones(1, dtype=torch.int32, device=device),
            page_tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
            slots=tokens - 1,
            positions=row,
            query_start_cpu=np.arange(2),
            kv_len_cpu=np.ones(1, np.int64),
            decoding=1,
            page_size=PROBE_PAGE_SIZE,
            scratch={LAUNCHES: launches, STATES: torch.arange(2, device=device).unsqueeze(1)},
        )
        if recurrent is not None:
            recurrent.bind(StateTensors(recurrent.layouts, 1, 0, device))
        self._paged.bind(KVTensors(self.layouts, 1, PROBE_PAGE_SIZE, self.dtype, device))
        with NoSyncs():  # type: ignore[no-untyped-call]
            self.logits(self.stream(tokens, batch), row)
        self._sizes = list(seen)


class _Recorded:
    """The model with graphs for the steps of a probe, recorded when it gets its pages."""

    def __init__(self, model: GraphModel, paged: PagedModel, record: Record) -> None:
        self._model, self._paged, self._record = model, paged, record
        self.layouts, self.dtype = model.layouts, model.dtype

    def bind(self, cache: KVTensors) -> None:
        self._model.bind(cache)
        if cache.num_pages and self._paged.recurrent is None:
            graphs = PromptGraphs(
                self._model,
                self._record,
                max_tokens=PROBE_TOKENS // 2,
                max_rows=1,
                pages_per_request=cache.num_pages,
                page_size=cache.page_size,
                device=self._paged.device,
            )
            graphs.serve()

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """A step; with states a graph holds it if it decodes."""
        recurrent, batch = self._paged.recurrent, inputs.batch
        if recurrent is None or not batch.decoding:
            return self._model.forward(inputs)
        before = np.asarray(batch.kv_len_cpu, np.int64) - 1
        rows = recurrent.states.advance(np.zeros(1, np.int64), before, np.ones(1, np.int64))
        places = torch.from_numpy(np.stack([rows.read, rows.write])).to(self._paged.device)
        batch = replace(batch, scratch={STATES: places})
        logits: list[torch.Tensor] = []

        def work() -> None:
            stream = self._model.stream(inputs.input_ids, batch)
            logits[:] = [self._model.logits(stream, inputs.sampled)]

        self._record(work)()
        return logits[0]


@torch.inference_mode()
def build_graph_model(
    paged: PagedModel,
    attention: PagedAttention,
    page_size: int = PROBE_PAGE_SIZE,
    peers: ProcessGroups | None = None,
) -> GraphModel | None:
    """Returns the model for graphs; None, with a line in the log, if no step can be recorded."""
    model = GraphModel(paged, attention, peers)
    all_agree = bool if peers is None else peers.all_agree
    name = type(paged.transformer).__name__

    def build() -> Iterator[_Recorded]:
        if (why := paged.why_unrecorded) is not None:
            raise UnrecognizedModule(why)
        model.observe()
        record = CudaRecorder() if paged.device.type == "cuda" else lambda work: work
        yield _Recorded(model, paged, record)

    try:
        tolerance = TOLERANCE.get(paged.dtype, 0.0)
        recorded = verified_replacement(paged, build, tolerance, page_size, all_agree)
    except (torch.OutOfMemoryError, PeerLost):
        raise
    except Exception as error:  # whatever a model's own code raises while it is recorded
        lines = str(error).strip().splitlines() or [""]
        logger.warning("%s cannot be recorded: %s: %s", name, type(error).__name__, lines[0])
        recorded = None
    if recorded is None:
        logger.warning("%s runs without CUDA graphs, layer by layer", name)
        return None
    logger.info("the steps of %s are CUDA graphs of transformers' own modules", name)
    return model
