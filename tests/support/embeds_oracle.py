"""The demo model with embeddings in its prompts: over HTTP, and transformers' own answers."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from inline_client import InlineClient
from rayfin import LLM
from rayfin.deployments.api.app import build_api
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.media.read_embeds import EmbedsReader

SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_cache_memory": 2**22}
OUTPUT = 6
BODY = {"model": "tiny", "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}


class Oracle:
    """What ``generate`` of transformers says to embeddings."""

    def __init__(self) -> None:
        folder = Path(__file__).parents[2] / "deployments" / "demo" / "model"
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.hidden = int(self.model.config.hidden_size)

    def rows(self, count: int, seed: int = 0) -> torch.Tensor:
        """Embeddings [count, hidden] of no token."""
        generator = torch.Generator().manual_seed(seed)
        own = self.model.get_input_embeddings()
        ids = torch.randint(3, 200, (2, count), generator=generator)
        with torch.inference_mode():
            rows: torch.Tensor = (own(ids[0]) + own(ids[1])) / 2
        return rows.clone()

    def embedded(self, pieces: Sequence[list[int] | torch.Tensor]) -> torch.Tensor:
        """The rows of a prompt, some of whose pieces are tokens."""
        own = self.model.get_input_embeddings()
        with torch.inference_mode():
            rows = [own(torch.tensor(p)) if isinstance(p, list) else p.float() for p in pieces]
        return torch.cat(rows).clone()

    def answer(self, rows: torch.Tensor) -> list[int]:
        """Its greedy tokens."""
        output = self.model.generate(
            inputs_embeds=rows.unsqueeze(0),
            attention_mask=torch.ones(1, len(rows), dtype=torch.int64),
            min_new_tokens=OUTPUT,
            max_new_tokens=OUTPUT,
            do_sample=False,
            eos_token_id=None,
        )
        tokens: list[int] = output[0].tolist()
        return tokens


def client_of(llm: LLM, embeds: EmbedsReader | None, **settings: Any) -> httpx.AsyncClient:
    """A client of the routes over the engine of ``llm``."""
    assert llm._tokenizer is not None
    engine: Any = InlineClient(llm._engine)
    service = OpenAIService(
        client=engine,
        tokenizer=llm._tokenizer,
        model_names=["tiny"],
        max_model_len=llm._engine.info.max_model_len,
        embeds=embeds,
        **settings,
    )
    transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def torch_file(rows: Any) -> str:
    """The file of ``torch.save``, in base64."""
    file = io.BytesIO()
    torch.save(rows, file)
    return in_base64(file.getvalue())


def safe_file(rows: torch.Tensor, name: str = "prompt_embeds") -> str:
    """A safetensors file, in base64."""
    return in_base64(safetensors.torch.save({name: rows.contiguous()}))
