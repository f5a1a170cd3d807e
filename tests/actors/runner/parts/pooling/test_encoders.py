"""Encoders: sentence-transformers' vectors and CrossEncoder's scores, equal bits in any batch."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import CrossEncoder, SentenceTransformer

from pooling_models import TEXTS, add_modules, make_decoder, make_encoder
from rayfin import LLM
from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.deployments.offline.pooling import (
    ClassificationOutput,
    EmbeddingOutput,
    PooledRequest,
    PoolingParams,
    ScoringOutput,
)

SETTINGS: dict[str, Any] = {"threads": 1, "max_decoding_batch": 4, "max_batch_tokens": 64}


def vectors_of(llm: LLM, texts: list[str], params: PoolingParams | None = None) -> np.ndarray:
    outputs = [one.outputs for one in llm.embed(texts, params, use_tqdm=False)]
    llm.check_integrity()
    return np.float32([own.embedding for own in outputs if isinstance(own, EmbeddingOutput)])


def scores_of(found: list[PooledRequest]) -> np.ndarray:
    return np.float32([o.outputs.score for o in found if isinstance(o.outputs, ScoringOutput)])


FOLDERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("bert", {"pooling_mode_cls_token": True}, {}),
    ("roberta", {"pooling_mode_mean_tokens": True}, {"normalize": False}),
    ("xlm-roberta", {"pooling_mode": "max"}, {}),
    ("distilbert", {"pooling_mode_mean_tokens": True}, {"dense": 12, "normalize": False}),
    ("nomic_bert", {"pooling_mode": "weightedmean"}, {}),
    ("modernbert", {"pooling_mode": "cls"}, {}),
    ("gte", {"pooling_mode": ["cls", "mean_sqrt_len_tokens"]}, {}),
    ("electra", {"pooling_mode": "lasttoken"}, {"sentence": {"do_lower_case": True}}),
]


@pytest.mark.parametrize(("kind", "pooling", "more"), FOLDERS, ids=[one[0] for one in FOLDERS])
def test_eight_folders(
    tmp_path: Path, kind: str, pooling: dict[str, Any], more: dict[str, Any]
) -> None:
    folder = add_modules(make_encoder(tmp_path, kind), pooling, **more)
    model = SentenceTransformer(str(folder))
    with LLM(str(folder), **SETTINGS) as llm:
        found = vectors_of(llm, TEXTS)
        assert np.abs(found - model.encode(TEXTS)).max() < 1e-5
        draw = random.Random(kind)
        for _ in range(12):
            picked = draw.choices(range(len(TEXTS)), k=draw.randint(1, 9))
            assert (vectors_of(llm, [TEXTS[place] for place in picked]) == found[picked]).all()
        words = " ".join(["cat"] * 200)
        cut = vectors_of(llm, [words], PoolingParams(truncate_prompt_tokens=-1))
        assert np.abs(cut - model.encode([words])).max() < 1e-5


PAIRS = [(TEXTS[0], TEXTS[1]), (TEXTS[3], TEXTS[2]), (TEXTS[4], TEXTS[5]), (TEXTS[0], TEXTS[4])]


@pytest.mark.parametrize(
    "kind",
    ["bert", "roberta", "distilbert", "modernbert", "nomic_bert", "gte", "electra"],
)
def test_cross_encoders(tmp_path: Path, kind: str) -> None:
    folder = make_encoder(tmp_path, kind, "classes", num_labels=1)
    wanted = CrossEncoder(str(folder)).predict(PAIRS)
    firsts, seconds = zip(*PAIRS, strict=True)
    with LLM(str(folder), **SETTINGS) as llm:
        found = scores_of(llm.score(list(firsts), list(seconds), use_tqdm=False))
        assert np.abs(found - wanted).max() < 1e-5
        alone = [scores_of(llm.score(*pair, use_tqdm=False))[0] for pair in PAIRS]
        assert (np.float32(alone) == found).all()
        ranked = llm.rerank(TEXTS[0], TEXTS[1:], use_tqdm=False)
        order = CrossEncoder(str(folder)).rank(TEXTS[0], TEXTS[1:])
        assert [place for place, _ in ranked] == [one["corpus_id"] for one in order]


def test_classes(tmp_path: Path) -> None:
    labels = {0: "bad", 1: "good", 2: "odd"}
    folder = make_encoder(tmp_path, "bert", "classes", id2label=labels)
    wanted = CrossEncoder(str(folder)).predict([(text, "") for text in TEXTS], apply_softmax=True)
    with LLM(str(folder), **SETTINGS) as llm:
        outputs = [one.outputs for one in llm.classify(TEXTS, use_tqdm=False)]
    found = [own.probs for own in outputs if isinstance(own, ClassificationOutput)]
    assert np.abs(np.array(found).sum(axis=1) - 1).max() < 1e-6
    assert np.array(found).shape == wanted.shape


def test_qwen3_rerankers_form(tmp_path: Path) -> None:
    """Its published recipe: the share of "yes" in a softmax over the logits of "yes" and "no"."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rayfin.deployments.pooling.pairs import RERANK_END, RERANK_SYSTEM, RERANK_TASK

    folder = make_decoder(tmp_path, max_position_embeddings=256)
    overrides = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    with LLM(str(folder), hf_overrides=overrides, **SETTINGS) as llm:
        found = scores_of(llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.convert_tokens_to_ids(["no", "yes"])
    wanted = []
    for document in TEXTS[1:]:
        text = f"<Instruct>: {RERANK_TASK}\n<Query>: {TEXTS[0]}\n<Document>: {document}"
        parts = (RERANK_SYSTEM, text, RERANK_END)
        ids = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]
        logits = model(torch.tensor([ids])).logits[0, -1, tokens]
        wanted.append(float(logits.softmax(dim=0)[1]))
    assert np.abs(found - wanted).max() < 1e-5


def test_what_attends_in_its_own_way_is_refused(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, "mpnet")
    with pytest.raises(UnsupportedModel, match="registry"):
        LLM(str(folder), **SETTINGS)


def test_no_row_of_an_encoder_is_rounded(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, "bert")
    with pytest.raises(InvalidConfig, match="has no such layer") as caught:
        LLM(str(folder), activations="int8", **SETTINGS)
    assert caught.value.param == "activations"
