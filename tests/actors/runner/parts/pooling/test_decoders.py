"""Decoders that pool: sentence-transformers' vectors, in any chunks, with pages shared."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM

from pooling_models import SIZE, TEXTS, add_modules, make_decoder
from rayfin import LLM, PoolingParams
from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.offline.pooling import EmbeddingOutput

ALL = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True, "pooling_mode": None}


def vectors_of(llm: LLM, texts: list[str], **params: Any) -> np.ndarray:
    found = llm.embed(texts, PoolingParams(**params), use_tqdm=False)
    outputs = [one.outputs for one in found]
    llm.check_integrity()
    return np.float32([own.embedding for own in outputs if isinstance(own, EmbeddingOutput)])


@pytest.mark.parametrize(
    ("kind", "pooling", "dense"),
    [
        ("qwen3", {"pooling_mode_lasttoken": True}, None),
        ("llama", {"pooling_mode": "mean"}, 12),
        ("gpt2", {"pooling_mode": ["cls", "max", "weightedmean", "mean_sqrt_len_tokens"]}, None),
    ],
)
def test_sentence_transformers_vectors(
    tmp_path: Path, kind: str, pooling: dict[str, Any], dense: int | None
) -> None:
    folder = add_modules(make_decoder(tmp_path, kind), pooling, dense=dense)
    wanted = SentenceTransformer(str(folder)).encode(TEXTS)
    first: np.ndarray | None = None
    for tokens in (5, 64):  # with 5, most prompts come in chunks
        settings: dict[str, Any] = {"max_batch_tokens": tokens, "max_decoding_batch": 4}
        with LLM(str(folder), threads=1, num_pages=32, **settings) as llm:
            found = vectors_of(llm, TEXTS)
            assert np.abs(found - wanted).max() < 1e-5
            again = vectors_of(llm, TEXTS)  # of pages of the prefix index, where it may be
            assert (again == found).all()
            assert llm.stats().finished["stop"] == 2 * len(TEXTS)
        first = found if first is None else first
        assert (first == found).all()


def test_a_shared_instruction_is_computed_once(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "query : " + "the cat sat on a mat " * 6}}
    folder = add_modules(
        make_decoder(tmp_path), {"pooling_mode_lasttoken": True}, settings=settings
    )
    with LLM(str(folder), threads=1, page_size=4, num_pages=64, max_batch_tokens=64) as llm:
        found = vectors_of(llm, TEXTS[:2] * 4, prompt_name="query")
        stats = llm.stats()
        assert stats.tokens_cached > stats.tokens_computed
        assert (found[:2] == found[-2:]).all()
        wanted = SentenceTransformer(str(folder)).encode(TEXTS[:2], prompt_name="query")
        assert np.abs(found[:2] - wanted).max() < 1e-5


def test_an_instruction_that_is_left_out(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "query : the "}}
    pooling = {"pooling_mode": "mean", "include_prompt": False}
    folder = add_modules(make_decoder(tmp_path), pooling, settings=settings)
    wanted = SentenceTransformer(str(folder)).encode(TEXTS, prompt_name="query")
    with LLM(str(folder), threads=1, num_pages=32) as llm:
        assert np.abs(vectors_of(llm, TEXTS, prompt_name="query") - wanted).max() < 1e-5


def test_a_generative_model_embeds_if_it_is_converted(tmp_path: Path) -> None:
    folder = make_decoder(tmp_path)
    with LLM(str(folder), threads=1, num_pages=32, convert="embed") as llm:
        found = vectors_of(llm, TEXTS)
    assert found.shape == (len(TEXTS), SIZE)
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-6


def test_a_checkpoint_in_16_bits_gives_the_same_bits(tmp_path: Path) -> None:
    """As one that holds the same numbers in 32: it is packed as it is stored."""
    folder, found = make_decoder(tmp_path / "made"), []
    for dtype in (torch.bfloat16, torch.float32):
        copy = Path(shutil.copytree(folder, tmp_path / str(dtype)))
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(copy)
        folder = copy
        add_modules(copy, {"pooling_mode_lasttoken": True})
        with LLM(str(copy), threads=1, num_pages=32, max_batch_tokens=64) as llm:
            found.append(vectors_of(llm, TEXTS))
    assert (found[0] == found[1]).all()


def test_settings_in_vllms_forms(tmp_path: Path) -> None:
    """A setting for each prompt, and an argument that cuts."""
    with LLM(str(make_decoder(tmp_path)), convert="embed", threads=1, num_pages=32) as llm:
        each = [PoolingParams(truncate_prompt_tokens=3), PoolingParams().clone()]
        outputs = llm.embed(TEXTS[:2], each, use_tqdm=False)
        whole = llm.embed(TEXTS[:2], use_tqdm=False)
        assert len(outputs[0].prompt_token_ids) == 3 and outputs[1].outputs == whole[1].outputs
        (cut,) = llm.embed(TEXTS[0], truncate_prompt_tokens=2, use_tqdm=False)
        assert len(cut.prompt_token_ids) == 2
        with pytest.raises(InvalidRequest, match="2 prompts and 1 pooling_params"):
            llm.embed(TEXTS[:2], each[:1], use_tqdm=False)
        with pytest.raises(InvalidRequest, match="use_activation.*pooler_config"):
            llm.embed(TEXTS[:2], PoolingParams(use_activation=False))
