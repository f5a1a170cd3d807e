"""Log probabilities of given tokens by another engine, for ``benchmarks/quality.py``.

``PYTHON logprobs.py llama FOLDER q8_0`` rounds a plain model by llama.cpp's own quantizer, ``llama
FILE`` reads a GGUF file, and ``transformers FOLDER`` a checkpoint of any method that transformers
knows there. Texts are tokens in JSON on stdin, results JSON on stdout.
"""

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Logits = Callable[[list[int]], np.ndarray]  # [tokens, vocabulary], float32


def of_llama(model: Path, precision: str = "") -> Logits:
    """llama.cpp with rows, cache and threads as in ``peers/llama.py``."""
    import llama_cpp as llama
    from llama import rounded

    llama.llama_backend_init()
    file = rounded(model, precision) if model.is_dir() else model
    loading = llama.llama_model_default_params()
    loading.use_extra_bufts = False  # AMX kernels of q8_0 crash in 0.3.36
    loaded = llama.llama_load_model_from_file(str(file).encode(), loading)
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 2
    context = llama.llama_new_context_with_model(loaded, params)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(loaded))

    def logits(ids: list[int]) -> np.ndarray:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        batch = llama.llama_batch_init(len(ids), 0, 1)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at], batch.logits[at] = token, at, 1
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        batch.n_tokens = len(ids)
        if llama.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        address = ctypes.cast(llama.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        rows = np.ctypeslib.as_array(address, (len(ids), vocabulary)).copy()
        llama.llama_batch_free(batch)
        return rows

    return logits


def of_transformers(folder: Path) -> Logits:
    """transformers, in float32 where the checkpoint's method computes in it."""
    import torch
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    settings: dict[str, Any] = {"dtype": torch.float32}
    if config.get("format") == "mxfp4-pack-quantized":  # its layers take bfloat16 alone
        settings["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, **settings)

    def logits(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].float().numpy()

    return logits


def logprobs(logits: Logits, texts: list[list[int]]) -> dict[str, list[float]]:
    """Of each token but the first of a text, and which was the likeliest in its place."""
    logprobs: list[float] = []
    likeliest: list[float] = []
    for ids in texts:
        rows = logits(ids)[:-1].astype(np.float64)
        rows -= rows.max(1, keepdims=True)
        logprobs += (rows[np.arange(len(rows)), ids[1:]] - np.log(np.exp(rows).sum(1))).tolist()
        likeliest += rows.argmax(1).tolist()
    return {"logprobs": logprobs, "likeliest": likeliest}


if __name__ == "__main__":
    engine, model, *precision = sys.argv[1:]
    place = Path(model)
    engine_logits = of_llama(place, *precision) if engine == "llama" else of_transformers(place)
    print(json.dumps(logprobs(engine_logits, json.load(sys.stdin))))
