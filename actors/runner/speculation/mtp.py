"""The head that a checkpoint brings along: a layer for multi-token prediction (MTP).

Transformers leaves these weights out. They have two forms: ``model.layers.N`` behind the last layer
(DeepSeek-V3, GLM-4.5), and ``mtp.*`` (Qwen3-Next, EXAONE). The layer is of the class of the model's
last one; embedding and head are the model's. Of several layers the first drafts all tokens.
(DeepSeek-V3, 2024, section 2.2.)
"""

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.model_files.shards import INDEX, Shards, read_header
from rayfin.actors.runner.loading import BASE, LoadedModel
from rayfin.actors.runner.speculation.head_model import HeadModel, fill
from rayfin.actors.runner.speculation.heads import require_states, with_head
from rayfin.actors.runner.speculation.taps import embedding_of, head_of, tap_last
from rayfin.actors.weights.version import WeightVersion

FIELD = "speculative_config"

BEHIND = {
    "enorm.": "embed_norm.",
    "hnorm.": "state_norm.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
    "shared_head.head.": None,
    "embed_tokens.": None,
    "": "layer.",
}
"""Names of the first form, as this module has them; None: the model's own, which it shares."""

APART = {
    "pre_fc_norm_embedding.": "embed_norm.",
    "pre_fc_norm_hidden.": "state_norm.",
    "fc.": "fc.",
    "norm.": "norm.",
    "layers.0.": "layer.",
    "": None,
}
"""Names of the second form. Further layers are left out."""

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class MtpHead(HeadModel):  # type: ignore[no-untyped-call]
    """The head: both inputs normed and merged, one layer, a norm, the model's head.

    Args:
        normed: the next draft takes the states behind the norm, not before it.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        like: Any,
        embed: Callable[[torch.Tensor], torch.Tensor],
        unembed: Callable[[torch.Tensor], torch.Tensor],
        *,
        normed: bool,
    ) -> None:
        hidden = config.hidden_size
        super().__init__(config, embed, hidden)
        kinds: Any = [type(part) for part in (like.norm, like.layers[-1], like.rotary_emb)]
        norm = partial(kinds[0], hidden, eps=config.rms_norm_eps)
        self.unembed = unembed
        self.embed_norm, self.state_norm, self.norm = norm(), norm(), norm()
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = kinds[1](config, 0)
        self.rotary_emb = kinds[2](config)
        self._normed = normed

    def guess(
        self, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The layer: embeddings and states [1, T, hidden] -> states [1, T, hidden]."""
        both = torch.cat([self.embed_norm(embeds), self.state_norm(states)], dim=-1)
        x = self.fc(both)
        out = self.layer(
            x,
            position_embeddings=self.rotary_emb(x, positions),
            attention_mask=None,
            position_ids=positions,
            use_cache=False,
        )
        hidden: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return hidden

    def score(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits [1, S, D] of ``guess``'s states, and the states that the next draft takes."""
        normed = self.norm(states)
        return self.unembed(normed), normed if self._normed else states


def with_mtp(loaded: LoadedModel, args: EngineArgs, version: WeightVersion = BASE) -> LoadedModel:
    """The model with the head of its own checkpoint, or of a ``version`` that has one.

    Raises:
        InvalidConfig: the checkpoint has none, or of another form.
    """
    require_states(loaded, args)
    refuse = partial(_refuse, args.model)
    config: Any = loaded.config.get_text_config(decoder=True)
    layers, files = config.num_hidden_layers, []
    sent = [] if version.is_base else version.files
    if head_names((name for file in sent for name in read_header(file)), layers):
        files = sent
    weights, normed = read_weights(args, layers, files)
    head_config = layer_config(config)
    like = _like(config, refuse)
    with loaded.device:
        parts = (embedding_of(loaded.model), head_of(loaded.model))
        head: Any = MtpHead(head_config, like, *parts, normed=normed)
    if args.load_format != "dummy":
        fill(head, weights, refuse)
    head.to(loaded.device, loaded.model.dtype).eval().requires_grad_(False)
    return with_head(loaded, args, head, tap_last(loaded.model))


def layer_config(config: Any) -> Any:
    """The configuration of the head's layer, which is the first and only one of its own."""
    head_config = copy.deepcopy(config)
    head_config._attn_implementation = "eager"  # until it is on pages
    head_config.num_hidden_layers = 1
    if getattr(head_config, "layer_types", None):
        head_config.layer_types = ["full_attention"]
    if getattr(head_config, "mlp_layer_types", None):
        head_config.mlp_layer_types = head_config.mlp_layer_types[-1:]
    if hasattr(head_config, "first_k_dense_replace"):
        head_config.first_k_dense_replace = 0
    return head_config


def _like(config: Any, refuse: Callable[[str], NoReturn]) -> Any:
    """A decoder without weights, whose classes the head takes."""
    model: Any = AutoModelForCausalLM
    with torch.device("meta"):
        like = model.from_config(config).get_decoder()
    if not all(hasattr(like, name) for name in ("layers", "norm", "rotary_emb")):
        refuse(f"is a {type(like).__name__}, whose layers are not known to draft")
    return like


def head_names(names: Iterable[str], layers: int) -> set[str]:
    """Those of a head among the names of tensors.

    Args:
        layers: that the model has.
    """
    return {name for name in names if _own_name(name, layers) is not None}


def _own_name(name: str, layers: int) -> tuple[str, bool] | None:
    """This module's name of a tensor of the head, and whether it is of the second form."""
    behind = re.compile(rf"(?:.*\.)?layers\.{layers}\.(.+)")
    of_first = behind.fullmatch(name) if "mtp." not in name else None
    of_second = re.fullmatch(r"(?:.*\.)?mtp\.(.+)", name)
    for match, names in ((of_second, APART), (of_first, BEHIND)):
        if match is not None and (renamed := _renamed(match[1], names)) is not None:
            return renamed, names is APART
    return None


def read_weights(
    args: EngineArgs, layers: int, files: Sequence[Path] = ()
) -> tuple[dict[str, torch.Tensor], bool]:
    """The weights of the head under this module's names, and whether it is of the second form.

    Args:
        layers: that the model has.
        files: that hold them; without any, those of the model's folder.

    Raises:
        InvalidConfig: the checkpoint has no such weights.
    """
    if args.load_format == "dummy":
        return {}, False
    weights: dict[str, torch.Tensor] = {}
    normed = False
    try:
        files = files or _files(args)
        shards = Shards(files)
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    if not shards.counts(name, file):
                        continue
                    if (renamed := _own_name(name, layers)) is not None:
                        weights[renamed[0]] = opened.get_tensor(name)
                        normed |= renamed[1]
    except (OSError, ValueError, SafetensorError) as error:
        first = (str(error).strip().splitlines() or ["unknown error"])[0]
        _refuse(args.model, f"cannot be read: {first}")
    if "fc.weight" not in weights:
        _refuse(args.model, "has no layer for multi-token prediction (mtp.*, or behind the last)")
    return _merged(weights), normed


def _renamed(name: str, names: dict[str, str | None]) -> str | None:
    for prefix, replacement in names.items():
        if name.startswith(prefix):
            return None if replacement is None else replacement + name.removeprefix(prefix)
    return None


def _merged(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts in one tensor each for gate and up, and down, as transformers has them."""
    merged: dict[str, torch.Tensor] = {}
    experts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for name, weight in weights.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            merged[name] = weight
        else:
            experts.setdefault((match[1], match[3]), {})[int(match[2])] = weight
    stacked = {
        key: torch.stack([parts[number] for number in sorted(parts)])
        for key, parts in experts.items()
    }
    for owner in {owner for owner, _ in stacked}:
        gate, up = stacked[owner, "gate"], stacked[owner, "up"]
        merged[f"{owner}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        merged[f"{owner}.down_proj"] = stacked[owner, "down"]
    return merged


def _files(args: EngineArgs) -> list[Path]:
    folder = Path(args.model)
    if not folder.is_dir():
        folder = Path(
            snapshot_download(args.model, allow_patterns=["*.safetensors", INDEX], **args.hub)
        )
    return sorted(folder.glob("*.safetensors"))


def _refuse(model: str, why: str) -> NoReturn:
    raise InvalidConfig(f"{FIELD} method 'mtp': {model} {why}", FIELD)
