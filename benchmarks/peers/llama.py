"""llama.cpp through its C interface (`pip install llama-cpp-python gguf safetensors`).

llama.cpp leaves batching to its caller, so this peer brings the loop of its server: a token for
each running request and chunks of prompts until the batch is full. The model is written to GGUF on
first use, beside its folder: of Llama and Qwen3 kinds, in f32, f16, q8_0, q4_0 or q4_K_M
(``precision``), the last three by llama.cpp's own quantizer.
``repack=false`` leaves weights as they are: with 0.3.36 the AMX kernels of q8_0 crash.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np
from gguf_model import F16, F32, converted, file_of
from peer import serve

MAX_SEQUENCES = 64
ROUNDED = {
    "q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_K_M": llama.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


@dataclass(slots=True)
class Stream:
    """A request in a sequence of the cache; ``pending`` are its tokens outside the cache."""

    index: int
    sequence: int
    pending: list[int]
    missing: int
    length: int = 0
    logits_at: int = field(default=-1)


class LlamaCpp:
    """``llama_decode`` over batches of tokens, greedy."""

    version = f"llama-cpp-python {version('llama-cpp-python')}"

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        llama.llama_backend_init()
        precision = settings.get("precision", "f32")
        path = (rounded if precision in ROUNDED else converted)(Path(model), precision)
        loading = llama.llama_model_default_params()
        loading.use_extra_bufts = bool(settings.get("repack", True))
        self._model = llama.llama_load_model_from_file(str(path).encode(), loading)
        self._batch_tokens = int(settings.get("max_batch_tokens", 512))
        params = llama.llama_context_default_params()
        params.n_ctx = int(settings.get("cache_tokens", 40960))
        params.n_batch = params.n_ubatch = self._batch_tokens
        params.n_seq_max = MAX_SEQUENCES
        params.n_threads = params.n_threads_batch = int(settings.get("threads", 2))
        params.kv_unified = True
        params.type_k = params.type_v = F32 if path.stem.endswith("f32") else F16
        self._context = llama.llama_new_context_with_model(self._model, params)
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(self._batch_tokens, 0, 1)
        self._free = list(range(MAX_SEQUENCES))
        self._waiting: list[tuple[int, list[int], int]] = []
        self._running: list[Stream] = []

    def add(self, index: int, prompt: list[int], output_tokens: int) -> None:
        self._waiting.append((index, prompt, output_tokens))

    def step(self) -> Iterable[tuple[int, int]]:
        while self._waiting and self._free:
            index, prompt, count = self._waiting.pop(0)
            self._running.append(Stream(index, self._free.pop(), list(prompt), count))
        self._fill()
        if llama.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed")
        for stream in self._running:
            if stream.logits_at >= 0:
                stream.pending = [self._best(stream.logits_at)]
                stream.missing -= 1
                yield stream.index, 1
        memory = llama.llama_get_memory(self._context)
        for stream in [stream for stream in self._running if not stream.missing]:
            llama.llama_memory_seq_rm(memory, stream.sequence, -1, -1)
            self._free.append(stream.sequence)
            self._running.remove(stream)

    def _fill(self) -> None:
        """Fills a batch with decodes first, then with prompts."""
        batch, used = self._batch, 0
        for stream in sorted(self._running, key=lambda stream: len(stream.pending) > 1):
            count = min(len(stream.pending), self._batch_tokens - used)
            for token in stream.pending[:count]:
                batch.token[used], batch.pos[used] = token, stream.length
                batch.n_seq_id[used], batch.seq_id[used][0] = 1, stream.sequence
                batch.logits[used] = 0
                stream.length += 1
                used += 1
            del stream.pending[:count]
            stream.logits_at = used - 1 if count and not stream.pending else -1
            if stream.logits_at >= 0:
                batch.logits[stream.logits_at] = 1
        batch.n_tokens = used

    def _best(self, at: int) -> int:
        logits = llama.llama_get_logits_ith(self._context, at)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (self._vocabulary,)).argmax())


def rounded(model: Path, precision: str) -> Path:
    """Writes the model as a GGUF file of weights that llama.cpp rounds.

    Raises:
        RuntimeError: llama.cpp cannot round them.
    """
    path = file_of(model, precision)
    if not path.exists():
        params = llama.llama_model_quantize_default_params()
        params.ftype, params.nthread = ROUNDED[precision], 2
        exact = str(converted(model, "f32")).encode()
        if llama.llama_model_quantize(exact, str(path).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp does not round {model} to {precision}")
    return path


if __name__ == "__main__":
    serve(LlamaCpp)
