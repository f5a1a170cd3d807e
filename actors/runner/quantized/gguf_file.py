"""Turns a GGUF file into a folder that is served as any other, tensor by tensor.

transformers knows which tensor of the file is which of the model, and what is done to it
(modeling_gguf_pytorch_utils.py): it reverses what llama.cpp's converter did. A layer of which that
only puts rows into another order stays in the file's blocks (gguf_blocks.py); of all others the
numbers are written. No more than one tensor is in memory.
"""

import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from gguf.quants import quant_shape_to_byte_shape
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    modeling_gguf_pytorch_utils,
)

from rayfin.actors.model_files.gguf_header import GgufTensor, Header, read_header
from rayfin.actors.model_files.gguf_tokenizer import end_tokens, make_tokenizer
from rayfin.actors.runner.quantized.experts import merges_projections
from rayfin.actors.runner.quantized.gguf_blocks import BLOCKS
from rayfin.actors.runner.quantized.linear import embedding_scale
from rayfin.actors.timing import GGUF_PROGRESS_SECONDS

READING: Any = modeling_gguf_pytorch_utils
"""What transformers knows of such files; it has no types."""

FLOATS = {"F32": torch.float32, "F16": torch.float16}
"""Types of tensors that stay as they are; others that are no blocks become bfloat16."""
NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}
PLAIN: dict[GGMLQuantizationType, Any] = {
    GGMLQuantizationType.F64: np.float64,
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.I8: np.int8,
    GGMLQuantizationType.I16: np.int16,
    GGMLQuantizationType.I32: np.int32,
    GGMLQuantizationType.I64: np.int64,
}
"""Types whose numbers are numpy's; others lie as bytes."""
EXPERTS = re.compile(r"(blk\.\d+\.ffn_(gate|up|down)_exps)\.weight")
SIZES = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Keys of the file without its architecture, and their names in a configuration."""
FREQUENCIES, SHORT, LONG = (
    f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")
)
"""Tensors of factors that divide the frequencies of positions."""
IGNORED = re.compile(r"rope_(freqs|factors_short|factors_long)\.weight|blk\.\d+\.attn_rot_embd\..*")
"""Tensors that no weight of a model is made of: ``set_positions`` reads them, or none is to."""

ENTRY_BYTES = 320
"""Of a tensor in the header of a safetensors file, at most."""

Array = np.ndarray[Any, Any]


class MappedTensor(NamedTuple):
    """A tensor of the file, mapped."""

    name: str
    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: Array  # rows of numbers, or of blocks' bytes


class Source(NamedTuple):
    """A tensor of the file, and how it is written."""

    tensor: MappedTensor
    name: str  # the model's, of blocks without its last part
    rows: Array | None = None  # the order of rows, if it stays blocks
    experts: int = 0  # so many layers lie in it


def convert(files: Sequence[str], folder: str) -> None:
    """Writes the model in ``files``, the parts of one, to ``folder``.

    Raises:
        ValueError: transformers does not know the model or all of it, or a file is broken.
    """
    first = Path(files[0])
    where: Any = {"pretrained_model_name_or_path": str(first.parent), "gguf_file": first.name}
    headers = [read_header(file) for file in files]
    header = headers[0]
    try:
        # transformers reads the other kinds of tokenizers.
        bpe = header.fields.get("tokenizer.ggml.model") == "gpt2"
        tokenizer = make_tokenizer(header.fields) if bpe else AutoTokenizer.from_pretrained(**where)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # of any kind of tokenizer; --tokenizer may name another one
        print(f"the tokenizer in {first.name} cannot be read: {error}", flush=True)
    tensors = [
        tensor
        for file, one in zip(files, headers, strict=True)
        for tensor in map_tensors(file, one.tensors)
    ]
    config, settings = read_config(header)
    completed(config, header, tensors)
    # transformers looks for the head in the first part alone.
    tied = config.tie_word_embeddings and all(one.name != "output.weight" for one in tensors)
    config.tie_word_embeddings = tied
    matrices = {one.tensor_type for one in tensors if len(one.shape) > 1}  # vectors are float32
    exact = matrices == {GGMLQuantizationType.F32}
    config.dtype = torch.float32 if exact else torch.bfloat16
    causal: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = causal.from_config(config)
    said = model.generation_config.eos_token_id
    ends = [*(said if isinstance(said, list) else [said]), *end_tokens(header.fields)]
    model.generation_config.eos_token_id = [*dict.fromkeys(one for one in ends if one is not None)]
    plan = Plan(header, settings, model, tensors)
    plan.require_all(tensors)
    if not plan.reads(tensors):
        if len(files) > 1:
            raise ValueError(
                "transformers reads a model of this kind from one file alone; "
                "llama-gguf-split --merge makes one of the parts"
            )
        return convert_whole(where, config, folder)
    sources = [source for one in tensors if (source := plan.source(one)) is not None]
    write(Path(folder, "model.safetensors"), plan, sources)
    config.architectures = [type(model).__name__]
    if any(source.rows is not None for source in sources):
        config.quantization_config = {"quant_method": "gguf", "tied": plan.shares_head}
        config.tie_word_embeddings = tied and not plan.shares_head
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def map_tensors(file: str, places: Sequence[GgufTensor]) -> list[MappedTensor]:
    """Maps the tensors of a file.

    Raises:
        ValueError: the file ends before one does, or one has a type that is not known.
    """
    data, tensors = np.memmap(file, np.uint8, "r"), []
    for one in places:
        kind = GGMLQuantizationType(one.kind)
        dtype = PLAIN.get(kind)
        shape = one.shape if dtype else quant_shape_to_byte_shape(one.shape, kind)
        end = one.offset + int(np.prod(shape)) * (np.dtype(dtype).itemsize if dtype else 1)
        if end > len(data):
            raise ValueError(f"it ends before its tensor {one.name} does")
        octets = data[one.offset : end]
        view = (octets.view(dtype) if dtype else octets).reshape(shape)
        tensors.append(MappedTensor(one.name, kind, one.shape, view))
    return tensors


def read_config(header: Header) -> tuple[Any, dict[str, Any]]:
    """Returns a file's configuration as transformers reads it, as an object and as it is named.

    transformers reads a header anew for each question, so it gets one without tokens.
    """
    with tempfile.TemporaryDirectory() as folder:
        header.write_short(short := Path(folder, "short.gguf"))
        settings = READING.load_gguf_checkpoint(str(short))["config"]
        config = AutoConfig.from_pretrained(folder, gguf_file=short.name)
    if "vocab_size" not in settings:
        config.vocab_size = len(header.fields["tokenizer.ggml.tokens"])
    return config, settings


def completed(config: Any, header: Header, tensors: Sequence[MappedTensor]) -> Any:
    """The configuration with what transformers does not read of a file.

    That is sizes which are no multiples of others, and how positions are scaled.

    Args:
        header: of the first part, which has all fields.
        tensors: of all parts.

    Raises:
        ValueError: positions are scaled in a way that is not known.
    """
    architecture = header.architecture
    mappings = READING.GGUF_TO_TRANSFORMERS_MAPPING["config"]
    known = mappings.get(architecture) or mappings.get(config.model_type) or {}
    for key, name in SIZES.items():
        stored = header.get(key)
        if stored and key not in known and hasattr(config, name):
            setattr(config, name, int(stored[0] if isinstance(stored, list) else stored))
    scaling = {
        key: setting
        for key in ("type", "factor", "attn_factor", "original_context_length")
        if (setting := header.get(f"rope.scaling.{key}")) is not None
    }
    factors = {
        one.name: one.data.astype(float).tolist()
        for one in tensors
        if one.name in (FREQUENCIES, SHORT, LONG)
    }
    set_positions(config, scaling, factors)
    return config


def set_positions(config: Any, scaling: dict[str, Any], factors: dict[str, list[float]]) -> None:
    """Sets what transformers does not read of how positions are scaled.

    Args:
        scaling: the file's fields ``rope.scaling``.
        factors: by which frequencies are divided, by the tensors' names: those of Llama 3.1 and
            later, or those of Phi-3 for short and for long texts.

    Raises:
        ValueError: transformers has no such way.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    rope = parameters.get("full_attention", parameters)  # Gemma's windows are not scaled
    rope_type, kind = rope.get("rope_type"), scaling.get("type") or "none"
    if rope_type == "proportional":  # Gemma 4's own way, which has the same factors
        factors = {name: numbers for name, numbers in factors.items() if name != FREQUENCIES}
    if kind == "linear" and rope_type == "default" and not factors:
        rope |= {"rope_type": "linear", "factor": float(scaling.get("factor", 1.0))}
    elif kind not in ("none", rope_type) and not (kind == "longrope" and factors):
        raise ValueError(f"its positions are scaled by {kind!r}, which is not read")
    if not factors:
        return
    first, size = next(iter(factors)), _rotary_size(config, rope)
    several = FREQUENCIES in factors and len(factors) > 1
    if rope_type != "default" or rope is not parameters or several:
        raise ValueError(f"its positions have factors ({first}) that are not read")
    for name, numbers in factors.items():
        if len(numbers) != size // 2:
            raise ValueError(f"{name} has {len(numbers)} factors, and the model {size // 2}")
    # In transformers' words: a list of factors, for short and for long texts.
    limit = config.max_position_embeddings
    original, attention = limit, (1.0 if FREQUENCIES in factors else scaling.get("attn_factor"))
    if FREQUENCIES not in factors:
        if len(factors) < 2 or "original_context_length" not in scaling:
            raise ValueError(f"its positions have {first} without all that it needs")
        original = config.original_max_position_embeddings = scaling["original_context_length"]
    rope |= {
        "rope_type": "longrope",
        "short_factor": factors.get(SHORT) or factors[FREQUENCIES],
        "long_factor": factors.get(LONG) or factors[FREQUENCIES],
        "factor": limit / original,
        "original_max_position_embeddings": original,
    }
    if attention is not None:
        rope["attention_factor"] = float(attention)


def _rotary_size(config: Any, rope: dict[str, Any]) -> int:
    """How many numbers of a head are turned."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(size * rope.get("partial_rotary_factor", 1.0))


def convert_whole(where: dict[str, Any], config: Any, folder: str) -> None:
    """Lets transformers read the file as a whole, and writes plain numbers.

    Raises:
        ValueError: the file lacks weights, or holds some of other shapes.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **where,
        config=config,
        dtype=config.dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, by name
    )
    model, report = loaded
    # transformers initializes these at random.
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"it lacks {len(missing)} weights, {missing[0]} among them")
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"it holds {name} of shape {list(stored)}, its sizes want {list(expected)}"
        )
    model.is_quantized, model.hf_quantizer = False, None  # as its weights no longer are
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)


class Plan:
    """What becomes of each tensor of a file.

    Raises:
        ValueError: transformers has no names for the model's tensors.
    """

    def __init__(
        self, header: Header, config: dict[str, Any], model: Any, tensors: Sequence[MappedTensor]
    ) -> None:
        architecture = header.architecture
        self._architecture = architecture
        self._processor = READING.TENSOR_PROCESSORS.get(architecture, READING.TensorProcessor)(
            config=config
        )
        find = READING.get_gguf_hf_weights_map
        self._names: dict[str, str] = find(_Childless(model), self._processor)
        if not all(self._knows(one.name) for one in tensors):
            self._names = find(model, self._processor)
        self._model = model
        self._paths = {id(module): path for path, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self._tied = model.config.tie_word_embeddings and type(head) is nn.Linear
        self._embedding = embedding if embedding_scale(embedding) is not None else None
        self.shares_head = False  # whether a tied table stays blocks, which are the head's too

    def require_all(self, tensors: Sequence[MappedTensor]) -> None:
        """Raises unless the model has every tensor.

        Raises:
            ValueError: it does not, and would be another one without it.
        """
        for one in tensors:
            if self._knows(one.name):
                continue
            raise ValueError(
                f"it holds {one.name}, and transformers has no such "
                f"{'experts' if '_exps' in one.name else 'tensor'} in a model of the kind "
                f"{self._architecture!r}"
            )

    def _knows(self, name: str) -> bool:
        experts = EXPERTS.fullmatch(name)
        known = (experts[1] if experts else name) in self._names
        return known or IGNORED.fullmatch(name) is not None

    def source(self, tensor: MappedTensor) -> Source | None:
        """How a tensor is written, or None if the model has none like it."""
        kind, name = tensor.tensor_type.name.lower(), self._names.get(tensor.name)
        if match := EXPERTS.fullmatch(tensor.name):
            path = self._names[match[1]].rpartition(".")[0]
            rows = np.arange(len(tensor.data[0])) if kind in BLOCKS else None
            return Source(tensor, f"{path}.*.{match[2]}_proj", rows, len(tensor.data))
        if name is None:
            return None
        owner, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(owner)
        if kind not in BLOCKS or leaf != "weight" or len(tensor.shape) != 2:
            return Source(tensor, name)
        if module is self._embedding:
            self.shares_head = self._tied
            return Source(tensor, owner, np.arange(len(tensor.data)))
        rows = self._order(tensor) if type(module) is nn.Linear else None
        return Source(tensor, name if rows is None else owner, rows)

    def reads(self, tensors: Sequence[MappedTensor]) -> bool:
        """Whether transformers merges experts from layers of the names that are written."""
        names = [match[1] for one in tensors if (match := EXPERTS.fullmatch(one.name))]
        paths = {self._names.get(name, "").rpartition(".")[0] for name in names}
        return all(path and merges_projections(self._model, path) for path in paths)

    def _order(self, tensor: MappedTensor) -> Array | None:
        """The order that transformers puts the rows into; None if it does anything else."""
        numbers = np.arange(len(tensor.data), dtype=np.int64).reshape(-1, 1)
        try:
            written = self._process(numbers, tensor.name)
        except (ValueError, IndexError):
            return None
        if len(written) != 1 or written[0][0] != self._names[tensor.name]:
            return None
        rows: Array = written[0][1]
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
        processed = self._processor.process(
            weights=weights, name=name, tensor_key_mapping=self._names, parsed_parameters=parsed
        )
        tensors = list(parsed["tensors"].items())
        if processed.name in self._names:
            tensors.append((self._names[processed.name], processed.weights))
        return tensors


class _Childless:
    """A model as transformers sees it that asks for a name's tensor in the whole model alone.

    It makes a table of all names for each of a model's modules, which takes ten seconds.
    """

    def __init__(self, model: Any) -> None:
        self.config, self.state_dict = model.config, model.state_dict

    def named_children(self) -> tuple[()]:
        return ()


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
    end, shown, whole = 0, time.monotonic(), sum(source.tensor.data.nbytes for source in sources)
    with path.open("wb") as file:
        file.seek(8 + room)
        for source in sorted(sources, key=_element, reverse=True):
            if time.monotonic() - shown > GGUF_PROGRESS_SECONDS:
                shown = time.monotonic()
                print(f"... {100 * end // max(whole, 1)} % of it", flush=True)
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
