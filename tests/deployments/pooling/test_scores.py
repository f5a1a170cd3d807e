"""Scores, orders, classes and raw vectors over HTTP, against CrossEncoder."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer

from described import Description
from pooling_models import SIZE, TEXTS, add_modules, make_encoder
from pooling_server import make_service, serve

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    labels = {0: "bad", 1: "good", 2: "odd"}
    embedder = add_modules(make_encoder(root / "embed", "roberta"), {"pooling_mode": "mean"})
    return {
        "score": make_encoder(root / "score", "bert", "classes", num_labels=1),
        "classes": make_encoder(root / "classes", "distilbert", "classes", id2label=labels),
        "embed": embedder,
    }


@pytest.fixture(scope="module")
def services(folders: dict[str, Path]) -> list[Any]:
    return [make_service(folder, name) for name, folder in folders.items()]


async def test_scores_and_orders(folders: dict[str, Path], services: list[Any]) -> None:
    http = serve(*services)
    model = CrossEncoder(str(folders["score"]))
    wanted = model.predict([(TEXTS[0], text) for text in TEXTS[1:]])
    for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")):
        body = dict(zip(names, (TEXTS[0], TEXTS[1:]), strict=True))
        answer = (await http.post("/v1/score", json=body)).json()
        assert np.abs([one["score"] for one in answer["data"]] - wanted).max() < 1e-5
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    order = model.rank(TEXTS[0], TEXTS[1:])
    documents: list[Any] = [{"text": TEXTS[1]}, *TEXTS[2:]]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = {"query": TEXTS[0], "documents": documents, "top_n": 3}
        results = (await http.post(path, json=body)).json()["results"]
        assert [one["index"] for one in results] == [one["corpus_id"] for one in order[:3]]
        for one, other in zip(results, order, strict=False):
            assert abs(one["relevance_score"] - other["score"]) < 1e-5
            assert one["document"]["text"] == TEXTS[1:][one["index"]]
    raw = await http.post(
        "/score", json={"text_1": "cat", "text_2": "dog", "use_activation": False}
    )
    logits = model.predict([("cat", "dog")], activation_fn=torch.nn.Identity())
    assert abs(raw.json()["data"][0]["score"] - logits[0]) < 1e-5


async def test_two_embeddings_score_by_their_cosine(
    folders: dict[str, Path], services: list[Any]
) -> None:
    http = serve(*services)
    body = {"model": "embed", "query": TEXTS[0], "documents": TEXTS[1:]}
    results = (await http.post("/rerank", json=body)).json()["results"]
    vectors = SentenceTransformer(str(folders["embed"])).encode(TEXTS)
    for one in results:
        assert abs(one["relevance_score"] - vectors[0] @ vectors[one["index"] + 1]) < 1e-5
    body = {"model": "embed", "input": TEXTS[0], "task": "token_embed"}
    (data,) = (await http.post("/pooling", json=body)).json()["data"]
    assert np.shape(data["data"]) == (8, SIZE)
    cohere = {"model": "embed", "texts": TEXTS, "embedding_types": ["float"]}
    found = (await http.post("/v2/embed", json=cohere)).json()["embeddings"]["float"]
    assert np.abs(np.array(found) - vectors).max() < 1e-5


async def test_classes(folders: dict[str, Path], services: list[Any]) -> None:

    from transformers import AutoModelForSequenceClassification

    answer = await serve(*services).post("/classify", json={"model": "classes", "input": TEXTS})
    model = AutoModelForSequenceClassification.from_pretrained(folders["classes"]).eval()
    for one, text in zip(answer.json()["data"], TEXTS, strict=True):
        ids = torch.tensor([services[1].tokenizer.encode(text)])
        wanted = model(ids).logits[0].softmax(dim=0).detach().numpy()
        assert np.abs(one["probs"] - wanted).max() < 1e-5
        assert one["label"] == ("bad", "good", "odd")[int(wanted.argmax())]
        assert one["num_classes"] == 3


REFUSED: list[tuple[str, dict[str, Any], str, int]] = [
    ("/score", {"text_1": "a"}, "missing_required_parameter", 400),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "invalid_value", 400),
    ("/score", {"text_1": "", "text_2": "a"}, "empty_prompt", 400),
    ("/score", {"text_1": "a", "text_2": ["b", 1]}, "invalid_type", 400),
    ("/score", {"model": "classes", "text_1": "a", "text_2": "b"}, "invalid_value", 400),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "integer_below_min_value", 400),
    ("/rerank", {"query": "a", "documents": []}, "empty_prompt", 400),
    ("/rerank", {"query": ["a"], "documents": ["b"]}, "invalid_type", 400),
    ("/classify", {"model": "embed", "input": "a"}, "model_not_supported", 404),
    ("/v1/embeddings", {"model": "score", "input": "a"}, "model_not_supported", 404),
    ("/v2/embed", {"model": "embed", "texts": "a"}, "invalid_type", 400),
    ("/pooling", {"model": "embed", "input": "a", "task": "classify"}, "invalid_value", 400),
]


@pytest.mark.parametrize(("path", "body", "code", "status"), REFUSED)
async def test_bad_bodies(
    services: list[Any], path: str, body: dict[str, Any], code: str, status: int
) -> None:
    answer = await serve(*services).post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error


async def test_answers_are_as_the_api_describes_them(services: list[Any]) -> None:
    http = serve(*services)
    description = await Description.of(http)
    pair = {"model": "score", "text_1": TEXTS[0], "text_2": TEXTS[1:3]}
    order = {"model": "score", "query": TEXTS[0], "documents": TEXTS[1:3]}
    inputs = {"model": "embed", "input": TEXTS[:2]}
    asked: list[tuple[str, dict[str, Any]]] = [
        *((path, pair) for path in ("/score", "/v1/score")),
        *((path, order) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        ("/rerank", order | {"return_documents": False}),
        ("/classify", {"model": "classes", "input": TEXTS[:2]}),
        *((path, inputs) for path in ("/v1/embeddings", "/pooling")),
        *(
            (path, inputs | {"encoding_format": "base64"})
            for path in ("/v1/embeddings", "/pooling")
        ),
        ("/pooling", inputs | {"task": "token_embed"}),
        ("/v2/embed", {"model": "embed", "texts": TEXTS[:2]}),
        ("/v1/embeddings", {"model": "embed"}),
    ]
    for path, body in asked:
        response = await http.post(path, json=body)
        assert response.status_code == (200 if len(body) > 1 else 400), response.text
        description.check(path, response)
