"""OpenVINO GenAI's continuous batching (`pip install openvino-genai optimum-intel[openvino]`).

The model is exported to OpenVINO's format on first use, beside its folder. Everything is in fp32
unless ``precision`` says otherwise: by default OpenVINO quantises cache and activations.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import openvino
import openvino_genai
from peer import serve

CHUNK_TOKENS = 512


class OpenVino:
    """``ContinuousBatchingPipeline.step`` over handles."""

    version = f"openvino_genai {openvino_genai.__version__}"

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        precision = settings.get("precision", "f32")
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = settings.get("max_batch_tokens", CHUNK_TOKENS)
        scheduler.dynamic_split_fuse = True
        scheduler.cache_size = settings.get("cache_gib", 4)
        scheduler.max_num_seqs = settings.get("max_decoding_batch", 64)
        scheduler.enable_prefix_caching = bool(settings.get("prefix_caching", False))
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
            "INFERENCE_NUM_THREADS": settings.get("threads", 2),
        }
        folder = exported(Path(model))
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(folder), openvino_genai.Tokenizer(str(folder)), scheduler, "CPU", **properties
        )
        self._handles: dict[int, Any] = {}
        self._runs = 0

    def add(self, index: int, prompt: list[int], output_tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._runs += 1
        ids = openvino.Tensor([prompt])
        self._handles[index] = self._pipeline.add_request(self._runs, ids, config)

    def step(self) -> Iterable[tuple[int, int]]:
        self._pipeline.step()
        for index, handle in list(self._handles.items()):
            while handle.can_read():
                yield index, sum(len(output.generated_ids) for output in handle.read().values())
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del self._handles[index]


def exported(model: Path) -> Path:
    """The model in OpenVINO's format, in fp32."""
    folder = model.with_name(f"{model.name}-openvino")
    if not (folder / "openvino_model.xml").exists():
        from optimum.intel import OVModelForCausalLM

        network = OVModelForCausalLM.from_pretrained(
            model, export=True, compile=False, load_in_8bit=False
        )
        network.save_pretrained(folder)
        export_tokenizer(model, folder)
    return folder


def export_tokenizer(model: Path, folder: Path) -> None:
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    both = convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
    for name, part in zip(("tokenizer", "detokenizer"), both, strict=True):
        openvino.save_model(part, folder / f"openvino_{name}.xml")


if __name__ == "__main__":
    serve(OpenVino)
