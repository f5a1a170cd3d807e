"""``ModelPart``: what a model has beside its decoder, as a runner sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayfin.actors.messages import BoolArray, Int32Array
from rayfin.actors.parts import Need, PartFacts
from rayfin.actors.runner.batch import RowInput
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.observers import StepObserver

if TYPE_CHECKING:  # they import modelling code
    from rayfin.actors.runner.cpu.decoder import CpuDecoder
    from rayfin.actors.runner.models.paged_model import PagedModel
    from rayfin.actors.runner.sampling.processor import ProcessorFactory
    from rayfin.actors.runner.sampling.sampler import StepSampler
    from rayfin.kernels.cpu.kernels import CpuKernels


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder over pages, which parts are put around."""

    paged: "PagedModel"
    kernels: "CpuKernels | None"
    rounded: bool  # its weights have fewer bits than those of the checkpoint


@dataclass(frozen=True, slots=True)
class Weights:
    """A decoder as it is read from a checkpoint."""

    model: Any
    whole: Any  # the model of which it may be a part
    parts: "tuple[ModelPart, ...]" = ()  # that come with it
    layers: range | None = None  # of a rank's share
    compared: bool = True  # with transformers, once it is over pages; False: a part sees to that


class ModelPart:
    """A part of a model; the defaults are those of one that changes nothing. To derive from."""

    facts: PartFacts | None = None  # None: there is nothing to know
    observers: Sequence[StepObserver] = ()  # of steps; they follow which slot has what of it
    processors: "Sequence[ProcessorFactory]" = ()  # rules on tokens; no CUDA graph is needed
    bytes_per_request = 0  # that it keeps beside pages
    token_layers: int | None = None  # of the cache, in front of its own; None: it has none
    max_tokens: int | None = None  # of a prompt; None: as many as the model has positions
    samples = True  # its logits become tokens; if not, ``make_sampler`` says what they become
    sees_ahead = False  # its tokens may see later ones
    hooks_layers = False  # it adds to the outputs of single layers, which stay modules

    row_inputs: Sequence[RowInput] = ()  # of CUDA graphs

    follows_weights = False  # it reads none of the decoder's weights for itself

    def takes(self, decoder: "CpuDecoder | None") -> bool:
        """Whether it works around a decoder that is one C call; None: around any."""
        return True

    def left_out(self, slots: Int32Array) -> BoolArray | None:
        """Which requests of ``slots`` [R] no CUDA graph computes; None: all are computed."""
        return None

    def alters(self, slots: Int32Array) -> BoolArray | None:
        """Finds which requests of ``slots`` [R] it computes otherwise than its model; None: none.

        A request that enters without a part of its own may not be known yet.
        """
        return None

    def over(self, decoder: Decoder) -> None:
        """Takes the decoder over pages, whose layers are still modules with their sizes."""

    def wrap(self, model: StepModel, decoder: Decoder) -> StepModel:
        """Puts itself around the ``model``, which computes what ``decoder`` does.

        Raises:
            UnsupportedModel: together they do not give the logits that transformers gives.
        """
        return model

    def prepare(self, needs: Sequence[Need], *, at_once: bool = False) -> None:
        """Prepares what requests to come need; another thread may call it beside steps.

        Args:
            needs: of any part; empty ones ask for what all of them take.
            at_once: the next step waits for it; else it gives way to steps.

        Raises:
            RayfinError: one cannot be used.
        """

    def make_sampler(self, rows: int) -> "StepSampler | None":
        """Returns what makes results of a forward in place of tokens; None: tokens are sampled."""
        return None
