"""Turns a GGUF file into a folder that is served as any other, tensor by tensor.

transformers knows which tensor of the file is which of the model, and what is done to it
(modeling_gguf_pytorch_utils.py): it reverses what llama.cpp's converter did. A layer of which that
only puts rows into another order stays in the file's blocks (gguf_blocks.py); of all others the
numbers are written. No more than one tensor is in memory.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    modeling_gguf_pytorch_utils,
)

from rayfin.actors.runner.quantized.experts import merges_projections
from rayfin.actors.runner.quantized.gguf_blocks import BLOCKS
from rayfin.actors.runner.quantized.linear import embedding_scale

READING: Any = modeling_gguf_pytorch_utils
"""What transformers knows of such files; it has no types."""

FLOATS = {"F32": torch.float32, "F16": torch.float16}
"""Types of tensors that stay as they are; others that are no blocks become bfloat16."""
NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}
EXPERTS = re.compile(r"(blk\.\d+\.ffn_(gate|up|down)_exps)\.weight")
SIZES = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Keys of the file without its architecture, and their names in a configuration."""

ENTRY_BYTES = 320
"""Of a tensor in the header of a safetensors file, at most."""

Array = np.ndarray[Any, Any]


class Source(NamedTuple):
    """A tensor of the file, and how it is written."""

    tensor: Any  # gguf's
    name: str  # the model's, of blocks without its last part
    rows: Array | None = None  # the order of rows, if it stays blocks
    experts: int = 0  # so many layers lie in it


def convert(files: Sequence[str], folder: str) -> None:
    """Writes the model in ``files``, the parts of one, to ``folder``.

    Raises:
        ValueError: transformers does not know the model, or a file is broken.
    """
    first = Path(files[0])
    where: Any = {"pretrained_model_name_or_path": str(first.parent), "gguf_file": first.name}
    try:
        AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    except Exception as error:  # of any kind of tokenizer; --tokenizer may name another one
        print(f"the tokenizer in {first.name} cannot be read: {error}", flush=True)
    readers = [GGUFReader(file) for file in files]
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    config = completed(AutoConfig.from_pretrained(**where), readers[0])
    # transformers looks for the head in the first part alone.
    tied = config.tie_word_embeddings and all(one.name != "output.weight" for one in tensors)
    config.tie_word_embeddings = tied
    matrices = {one.tensor_type for one in tensors if len(one.shape) > 1}  # vectors are float32
    exact = matrices == {GGMLQuantizationType.F32}
    config.dtype = torch.float32 if exact else torch.bfloat16
    causal: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = causal.from_config(config)
    settings = READING.load_gguf_checkpoint(str(first))["config"]
    plan = Plan(readers[0], settings, model)
    if not plan.reads(tensors):
        return convert_whole(where, config.dtype, folder)
    sources = [source for one in tensors if (source := plan.source(one)) is not None]
    write(Path(folder, "model.safetensors"), plan, sources)
    config.architectures = [type(model).__name__]
    if any(source.rows is not None for source in sources):
        config.quantization_config = {"quant_method": "gguf", "tied": plan.shares_head}
        config.tie_word_embeddings = tied and not plan.shares_head
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def completed(config: Any, reader: GGUFReader) -> Any:
    """The configuration with what transformers does not read of it.

    That is sizes which are no multiples of others, and the factors by which Llama 3.1 and later
    turn positions more slowly, which lie in a tensor.
    """
    architecture = READING.read_field(reader, "general.architecture")[0]
    for key, name in SIZES.items():
        if (found := READING.read_field(reader, f"{architecture}.{key}")) and hasattr(config, name):
            setattr(config, name, int(found[0]))
    factors = [one.data for one in reader.tensors if one.name == "rope_freqs.weight"]
    if factors and config.rope_parameters.get("rope_type") == "default":
        # In transformers' words: a list of factors, for short and for long texts.
        numbers = factors[0].astype(float).tolist()
        config.rope_parameters |= {
            **{"rope_type": "longrope", "short_factor": numbers, "long_factor": numbers},
            **{"attention_factor": 1.0, "factor": 1.0},
            "original_max_position_embeddings": config.max_position_embeddings,
        }
    return config


def convert_whole(where: dict[str, Any], dtype: torch.dtype, folder: str) -> None:
    """Lets transformers read the file as a whole, and writes plain numbers."""
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype)
    model.is_quantized, model.hf_quantizer = False, None  # as its weights no longer are
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)


class Plan:
    """What becomes of each tensor of a file.

    Raises:
        ValueError: transformers has no names for the model's tensors.
    """

    def __init__(self, reader: GGUFReader, config: dict[str, Any], model: Any) -> None:
        architecture = READING.read_field(reader, "general.architecture")[0]
        self._processor = READING.TENSOR_PROCESSORS.get(architecture, READING.TensorProcessor)(
            config=config
        )
        self._names: dict[str, str] = READING.get_gguf_hf_weights_map(model, self._processor)
        self._model = model
        self._paths = {id(module): path for path, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = model.config.tie_word_embeddings and type(head) is nn.Linear
        self._embedding = embedding if embedding_scale(embedding) is not None else None
        self._tied_head = self._paths[id(head)] if tied and self._embedding is not None else None
        self.shares_head = False  # whether a tied table stays blocks, which are the head's

    def source(self, tensor: Any) -> Source | None:
        """How a tensor is written, or None if the model has none like it."""
        kind, name = tensor.tensor_type.name.lower(), self._names.get(tensor.name)
        if found := EXPERTS.fullmatch(tensor.name):
            path = self._names[found[1]].rpartition(".")[0]
            rows = np.arange(len(tensor.data[0])) if kind in BLOCKS else None
            return Source(tensor, f"{path}.*.{found[2]}_proj", rows, len(tensor.data))
        if name is None:
            return None
        owner, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(owner)
        if kind not in BLOCKS or leaf != "weight" or len(tensor.shape) != 2:
            return Source(tensor, name)
        if module is self._embedding:
            self.shares_head = self._tied_head is not None
            return Source(tensor, self._tied_head or owner, np.arange(len(tensor.data)))
        rows = self._order(tensor) if type(module) is nn.Linear else None
        return Source(tensor, name if rows is None else owner, rows)

    def reads(self, tensors: Sequence[Any]) -> bool:
        """Whether transformers merges experts from layers of the names that are written."""
        found = [match[1] for one in tensors if (match := EXPERTS.fullmatch(one.name))]
        paths = {self._names.get(name, "").rpartition(".")[0] for name in found}
        return all(path and merges_projections(self._model, path) for path in paths)

    def _order(self, tensor: Any) -> Array | None:
        """The order that transformers puts the rows into; None if it does anything else."""
        numbers = np.arange(len(tensor.data), dtype=np.int64).reshape(-1, 1)
        try:
            made = self._process(numbers, tensor.name)
        except (ValueError, IndexError):
            return None
        if len(made) != 1 or made[0][0] != self._names[tensor.name]:
            return None
        rows: Array = made[0][1]
        if rows.shape != numbers.shape or not np.array_equal(np.sort(rows, axis=0), numbers):
            return None
        return rows.ravel()

    def entries(self, source: Source) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors to write of one in the file."""
        tensor, kind = source.tensor, source.tensor.tensor_type.name
        if source.experts:
            for number, data in enumerate(tensor.data):
                layer = source.name.replace("*", str(number))
                if source.rows is not None:
                    yield (f"{layer}.{kind.lower()}", torch.from_numpy(np.array(data)))
                else:
                    weight = dequantize(data, tensor.tensor_type)
                    yield (f"{layer}.weight", _numbers(weight, kind))
            return
        if source.rows is not None:
            yield (f"{source.name}.{kind.lower()}", torch.from_numpy(tensor.data[source.rows]))
            return
        weights = dequantize(tensor.data, tensor.tensor_type)
        for name, numbers in self._process(weights, tensor.name):
            yield (name, _numbers(numbers, kind))

    def _process(self, weights: Array, name: str) -> list[tuple[str, Any]]:
        """Names and numbers of the model's tensors that transformers makes of one in the file."""
        parsed: dict[str, Any] = {"tensors": {}}
        made = self._processor.process(
            weights=weights, name=name, tensor_key_mapping=self._names, parsed_parameters=parsed
        )
        found = list(parsed["tensors"].items())
        if made.name in self._names:
            found.append((self._names[made.name], made.weights))
        return found


def _numbers(weights: Any, kind: str) -> torch.Tensor:
    numbers = weights if isinstance(weights, torch.Tensor) else torch.from_numpy(np.array(weights))
    return numbers.to(FLOATS.get(kind, torch.bfloat16)).contiguous()


def write(path: Path, plan: Plan, sources: Sequence[Source]) -> None:
    """A safetensors file of all tensors, one after the other.

    Its header is written at the end, into room that was left for it. Tensors of large elements are
    first, so that all of them lie at multiples of their element's size.
    """
    count = sum(source.experts or 1 for source in sources)
    room = -(-ENTRY_BYTES * (count + 1) // 64) * 64
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    with path.open("wb") as file:
        file.seek(8 + room)
        for source in sorted(sources, key=_element, reverse=True):
            for name, tensor in plan.entries(source):
                octets = tensor.reshape(-1).view(torch.uint8).numpy()
                file.write(octets.data)
                places = [end, end := end + octets.size]
                dtype, shape = NAMES[tensor.dtype], list(tensor.shape)
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": places}
        text = json.dumps(header).encode()
        assert len(text) <= room
        file.seek(0)
        file.write(room.to_bytes(8, "little") + text.ljust(room))


def _element(source: Source) -> int:
    """The bytes of an element of what is written."""
    if source.rows is not None:
        return 1
    return FLOATS.get(source.tensor.tensor_type.name, torch.bfloat16).itemsize
