"""Heads in plain torch, over whole texts without a cache; fitted to tiny models."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

LAYERS = (0, 1, 2)
"""Of the tiny models, whose inputs the head reads."""

DRAFT_VOCABULARY = 100
EPS, THETA = 1e-5, 10000.0


class PlainEagle3(nn.Module):
    """The published layer; its parameters have the published names, with ``_`` for ``.``."""

    def __init__(self, target: Any, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = target.config
        self.target = [target]  # no parameters of this module
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim, hidden = config.head_dim, config.hidden_size
        sizes = {
            "fc.weight": (hidden, len(LAYERS) * hidden),
            "midlayer.self_attn.q_proj.weight": (self.heads * self.dim, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": (self.kv_heads * self.dim, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": (self.kv_heads * self.dim, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": (hidden, self.heads * self.dim),
            "midlayer.mlp.gate_proj.weight": (48, hidden),
            "midlayer.mlp.up_proj.weight": (48, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, 48),
            "lm_head.weight": (DRAFT_VOCABULARY, hidden),
        }
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.weights = nn.ParameterDict()
        for name, size in sizes.items():
            self.weights[name.replace(".", "_")] = nn.Parameter(torch.randn(size) * 0.2)
        for name in (*(f"midlayer.{norm}.weight" for norm in norms), "norm.weight"):
            self.weights[name.replace(".", "_")] = nn.Parameter(torch.rand(hidden) + 0.5)
        self.names = [*sizes, *(f"midlayer.{norm}.weight" for norm in norms), "norm.weight"]
        self.kept = torch.randperm(config.vocab_size)[:DRAFT_VOCABULARY].sort().values

    def weight(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.weights[f"{name}.weight".replace(".", "_")]
        return found

    @torch.no_grad()
    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """What the head reads of a text: [T, 3 * hidden]."""
        out = self.target[0](torch.tensor([list(tokens)]), output_hidden_states=True)
        return torch.cat([out.hidden_states[layer][0] for layer in LAYERS], dim=-1)

    def layer(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """States [T, hidden] before ``tokens`` [T] -> states [T, hidden]."""
        embeds = self.target[0].get_input_embeddings()(tokens).detach()
        both = torch.cat(
            [
                _norm(embeds, self.weight("midlayer.input_layernorm")),
                _norm(states, self.weight("midlayer.hidden_norm")),
            ],
            dim=-1,
        )
        query, key, value = (
            (both @ self.weight(f"midlayer.self_attn.{name}_proj").T).view(
                len(tokens), -1, self.dim
            )
            for name in "qkv"
        )
        groups = self.heads // self.kv_heads
        query, key = _rotate(query), _rotate(key).repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / self.dim**0.5
        later = torch.ones(len(tokens), len(tokens)).triu(1).bool()
        chances = scores.masked_fill(later, float("-inf")).softmax(-1)
        value = value.repeat_interleave(groups, 1)
        attended = torch.einsum("hqk,khd->qhd", chances, value).flatten(1)
        states = states + attended @ self.weight("midlayer.self_attn.o_proj").T
        x = _norm(states, self.weight("midlayer.post_attention_layernorm"))
        gate, up = (x @ self.weight(f"midlayer.mlp.{name}_proj").T for name in ("gate", "up"))
        return states + (F.silu(gate) * up) @ self.weight("midlayer.mlp.down_proj").T

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return _norm(states, self.weight("norm")) @ self.weight("lm_head").T

    @torch.no_grad()
    def drafts(self, text: Sequence[int], count: int) -> list[int]:
        """The ``count`` tokens that the head guesses behind a text, all computed anew for each."""
        states = self.states(text[:-1]) @ self.weight("fc").T
        tokens = list(text[1:])
        for _ in range(count):
            out = self.layer(torch.tensor(tokens), states)
            tokens.append(int(self.kept[self.logits(out[-1]).argmax()]))
            states = torch.cat([states, out[-1:]])
        return tokens[len(text) - 1 :]

    def fit(self, texts: Sequence[Sequence[int]], steps: int = 150) -> None:
        """Learns how the texts go on, in a vocabulary that has their tokens."""
        said = {token for text in texts for token in text}
        others = [token for token in self.kept.tolist() if token not in said]
        kept = sorted([*said, *others][:DRAFT_VOCABULARY])
        self.kept = torch.tensor(kept)
        index = {token: place for place, token in enumerate(self.kept.tolist())}
        samples = []
        for text in texts:
            wanted = torch.tensor([index.get(token, -100) for token in text[2:]])
            samples.append((torch.tensor(text[1:-1]), self.states(text)[:-2], wanted))
        optimizer = torch.optim.Adam(self.weights.values(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            for tokens, states, wanted in samples:
                out = self.layer(tokens, states @ self.weight("fc").T)
                F.cross_entropy(self.logits(out), wanted).backward()
            optimizer.step()

    def save(self, folder: Path) -> None:
        """Writes the published format."""
        config = self.target[0].config
        written = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "draft_vocab_size": DRAFT_VOCABULARY,
            "hidden_size": config.hidden_size,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "max_position_embeddings": config.max_position_embeddings,
            "hidden_act": "silu",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
        }
        (folder / "config.json").write_text(json.dumps(written))
        tensors = {name: self.weight(name.removesuffix(".weight")).data for name in self.names}
        tensors["d2t"] = self.kept - torch.arange(DRAFT_VOCABULARY)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][self.kept] = True
        save_file(
            {name: one.contiguous() for name, one in tensors.items()}, folder / "m.safetensors"
        )


class PlainMtp(nn.Module):
    """The layer for multi-token prediction over whole texts: the model's own class, no cache.

    Args:
        behind: the checkpoint's form, ``model.layers.N``; else ``mtp.*``.
    """

    def __init__(self, target: Any, *, behind: bool, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = copy.deepcopy(target.config)
        config._attn_implementation, config.num_hidden_layers = "eager", 1
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0
        if hasattr(config, "layer_types"):
            config.layer_types = ["full_attention"]
        decoder = target.get_decoder()
        self.target, self.behind = [target], behind  # no parameters of this module
        hidden, norm = config.hidden_size, type(decoder.norm)
        self.enorm, self.hnorm, self.norm = (norm(hidden, config.rms_norm_eps) for _ in range(3))
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = type(decoder.layers[-1])(config, 0)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.uniform_(parameter, 0.5, 1.5)
            elif name != "target":
                nn.init.normal_(parameter, 0.0, 0.2)
        for name, buffer in self.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.2)
        self.requires_grad_(True)

    @torch.no_grad()
    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """What the head reads of a text: [T, hidden]."""
        out = self.target[0].get_decoder()(torch.tensor([list(tokens)]))
        states: torch.Tensor = out.last_hidden_state[0]
        return states

    def forward(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """States [T, hidden] before ``tokens`` [T] -> states [T, hidden]."""
        target, count = self.target[0], len(tokens)
        embeds = target.get_input_embeddings()(tokens).detach()
        x = self.fc(torch.cat([self.enorm(embeds), self.hnorm(states)], dim=-1)).unsqueeze(0)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        rotary = target.get_decoder().rotary_emb(x, torch.arange(count).unsqueeze(0))
        out = self.layer(x, attention_mask=mask, position_embeddings=rotary)
        found: torch.Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return found

    @torch.no_grad()
    def drafts(self, text: Sequence[int], count: int) -> list[int]:
        """The ``count`` tokens that the head guesses behind a text, all computed anew for each."""
        states, tokens = self.states(text[:-1]), list(text[1:])
        for _ in range(count):
            out = self.forward(torch.tensor(tokens), states)[-1:]
            normed = self.norm(out)
            tokens.append(int(self.target[0].lm_head(normed)[0].argmax()))
            states = torch.cat([states, out if self.behind else normed])
        return tokens[len(text) - 1 :]

    def fit(self, texts: Sequence[Sequence[int]], steps: int = 100) -> None:
        """Learns how the texts go on."""
        samples = [
            (torch.tensor(text[1:-1]), self.states(text)[:-2], torch.tensor(text[2:]))
            for text in texts
        ]
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            for tokens, states, wanted in samples:
                logits = self.target[0].lm_head(self.norm(self.forward(tokens, states)))
                F.cross_entropy(logits, wanted).backward()
            optimizer.step()

    def save(self, folder: Path) -> None:
        """Writes its weights beside those of the model in ``folder``."""
        first = {"enorm": "enorm", "hnorm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"}
        second = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
        names = {**first, "layer": ""} if self.behind else {**second, "layer": "layers.0"}
        prefix = f"model.layers.{self.target[0].config.num_hidden_layers}" if self.behind else "mtp"
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self.state_dict().items():
            module, rest = name.split(".", 1)
            parts = [part for part in (prefix, names.get(module, module), rest) if part]
            tensors |= _split_experts(".".join(parts), tensor)
        if self.behind:  # published checkpoints repeat what the head shares
            tensors[f"{prefix}.embed_tokens.weight"] = torch.zeros(2, 2)
        save_file(
            {name: one.contiguous() for name, one in tensors.items()}, folder / "z.safetensors"
        )


class PlainEagle(PlainMtp):
    """The first EAGLE: no norms but those within the layer."""

    def __init__(self, target: Any, seed: int = 0) -> None:
        super().__init__(target, behind=False, seed=seed)
        self.enorm = self.hnorm = self.norm = nn.Identity()
        self.layer.input_layernorm = nn.Identity()

    def save(self, folder: Path) -> None:
        """Writes the published format into a folder of its own."""
        config = self.target[0].config.to_dict()
        config |= {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {
            name.replace("layer.", "layers.0."): tensor.contiguous()
            for name, tensor in self.state_dict().items()
        }
        embedding = self.target[0].get_input_embeddings().weight.data.clone()
        save_file(tensors | {"embed_tokens.weight": embedding}, folder / "model.safetensors")


def _split_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """One tensor of a checkpoint for each expert and projection."""
    owner, _, last = name.rpartition(".")
    if not owner.endswith(".experts"):
        return {name: tensor}
    projections = {"gate_proj": tensor}
    if last == "gate_up_proj":
        gate, up = tensor.chunk(2, dim=1)
        projections = {"gate_proj": gate, "up_proj": up}
    elif last == "down_proj":
        projections = {"down_proj": tensor}
    return {
        f"{owner}.{expert}.{projection}.weight": weight.clone()
        for projection, weights in projections.items()
        for expert, weight in enumerate(weights)
    }


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings of [T, heads, dim] at the positions 0, 1, ..."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] / THETA ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
