"""POST /v1/embeddings over a decoder: against sentence-transformers, and all that is refused."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError
from sentence_transformers import SentenceTransformer

from pooling_models import TEXTS, add_modules, make_decoder, write
from pooling_server import make_service, serve

pytestmark = pytest.mark.anyio
QUERY = "query : "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_decoder(tmp_path_factory.mktemp("models") / "lasttoken")
    settings = {"prompts": {"query": QUERY}, "similarity_fn_name": "cosine"}
    add_modules(made, {"pooling_mode_lasttoken": True}, settings=settings)
    config = json.loads((made / "config.json").read_text())
    write(made / "config.json", config | {"matryoshka_dimensions": [8, 16, 32]})
    return made


@pytest.fixture(scope="module")
def service(folder: Path) -> Any:
    return make_service(folder)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> np.ndarray:
    vectors: np.ndarray = SentenceTransformer(str(folder)).encode(TEXTS)
    return vectors


async def test_ollamas_routes(service: Any, wanted: np.ndarray) -> None:
    http = serve(service)
    body = {"model": "tiny:latest", "input": TEXTS, "keep_alive": 0}
    answer = (await http.post("/api/embed", json=body)).json()
    assert np.abs(np.array(answer["embeddings"]) - wanted).max() < 1e-5
    assert answer["model"] == "tiny:latest" and answer["prompt_eval_count"] > 0
    small = await http.post("/api/embed", json={**body, "dimensions": 8})
    assert np.array(small.json()["embeddings"]).shape == (len(TEXTS), 8)
    shown = await http.post("/api/show", json={"name": "tiny"})
    assert shown.json()["capabilities"] == ["embedding"]


async def test_the_openai_client(service: Any, wanted: np.ndarray) -> None:
    http = serve(service)
    client = AsyncOpenAI(api_key="none", base_url="http://rayfin/v1", http_client=http)
    in_base64 = await client.embeddings.create(model="tiny", input=TEXTS)  # its own default
    floats = await client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    for answer in (in_base64, floats):
        vectors = np.array([one.embedding for one in answer.data])
        assert np.abs(vectors - wanted).max() < 1e-5
    same = [np.float32(one.embedding) for one in floats.data]
    for mine, theirs in zip(same, in_base64.data, strict=True):
        assert (mine == np.float32(theirs.embedding)).all()
    assert (
        floats.usage.prompt_tokens
        == floats.usage.total_tokens
        == sum(len(service.tokenizer.encode(text)) for text in TEXTS)
    )
    small = await client.embeddings.create(model="tiny", input=TEXTS, dimensions=8)
    cut = wanted[:, :8] / np.linalg.norm(wanted[:, :8], axis=1, keepdims=True)
    assert np.abs(np.array([one.embedding for one in small.data]) - cut).max() < 1e-5
    with pytest.raises(BadRequestError, match="matryoshka"):
        await client.embeddings.create(model="tiny", input="a", dimensions=9)


async def test_ids_prompts_and_truncation(service: Any, folder: Path, wanted: np.ndarray) -> None:
    http = serve(service)

    async def embed(**body: Any) -> list[np.ndarray]:
        answer = await http.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        return [np.float32(one["embedding"]) for one in answer.json()["data"]]

    ids = [service.tokenizer.encode(text) for text in TEXTS]
    assert np.abs(np.array(await embed(input=ids)) - wanted).max() < 1e-5
    (one,) = await embed(input=ids[0])
    assert np.abs(one - wanted[0]).max() < 1e-5
    model = SentenceTransformer(str(folder))
    (asked,) = await embed(input=TEXTS[0], prompt_name="query")
    assert np.abs(asked - model.encode(TEXTS[0], prompt_name="query")).max() < 1e-5
    model.max_seq_length = 4
    (short,) = await embed(input=TEXTS[0], truncate_prompt_tokens=4)
    assert np.abs(short - model.encode(TEXTS[0])).max() < 1e-5
    words = " ".join(["cat"] * 200)
    (whole,) = await embed(input=words, truncate_prompt_tokens=-1)
    model.max_seq_length = 64
    assert np.abs(whole - model.encode(words)).max() < 1e-5
    plain = await http.post(
        "/v1/embeddings", json={"input": "cat", "encoding_format": "base64", "n": 2, "odd": 1}
    )
    assert plain.headers["x-rayfin-ignored-fields"] == "n,odd"
    text = plain.json()["data"][0]["embedding"]
    assert np.abs(np.frombuffer(base64.b64decode(text), "<f4") - wanted[4]).max() < 1e-5


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({}, "missing_required_parameter", "input"),
    ({"input": ""}, "empty_prompt", "input"),
    ({"input": []}, "empty_prompt", "input"),
    ({"input": ["a", ""]}, "empty_prompt", "input[1]"),
    ({"input": [[1], []]}, "empty_prompt", "input[1]"),
    ({"input": ["a", [1]]}, "invalid_type", "input[1]"),
    ({"input": 3}, "invalid_type", "input"),
    ({"input": {"prompt": "a"}}, "invalid_type", "input"),
    ({"input": [1, "a"]}, "invalid_type", "input[1]"),
    ({"input": [999]}, "invalid_token_id", "input"),
    ({"input": [-1]}, "invalid_token_id", "input"),
    ({"input": ["a"] * 2049}, "array_above_max_length", "input"),
    ({"input": [1] * 65}, "context_length_exceeded", "input"),
    ({"input": " ".join(["cat"] * 65)}, "context_length_exceeded", "input"),
    ({"input": ["a", " ".join(["cat"] * 99)]}, "context_length_exceeded", "input[1]"),
    ({"input": "a", "truncate_prompt_tokens": 65}, "integer_above_max_value", None),
    ({"input": "a", "truncate_prompt_tokens": 0}, "integer_below_min_value", None),
    ({"input": "a", "truncate_prompt_tokens": -2}, "integer_below_min_value", None),
    ({"input": "a", "truncation_side": "middle"}, "invalid_value", "truncation_side"),
    ({"input": "a", "dimensions": 0}, "integer_below_min_value", "dimensions"),
    ({"input": "a", "dimensions": -1}, "integer_below_min_value", "dimensions"),
    ({"input": "a", "dimensions": 33}, "invalid_value", "dimensions"),
    ({"input": "a", "dimensions": "8"}, "invalid_type", "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
    ({"input": "a", "prompt_name": "none"}, "invalid_value", "prompt_name"),
    ({"input": "a", "priority": 2**40}, "invalid_value", "priority"),
    ({"input": "a", "cache_salt": ""}, "invalid_value", "cache_salt"),
    ({"input": "a", "messages": []}, "invalid_value", "messages"),
    ({"input": "a", "model": "other"}, "model_not_found", "model"),
    ({"messages": [{"role": "user", "content": "a"}]}, "invalid_value", None),
]


@pytest.mark.parametrize(("body", "code", "param"), REFUSED)
async def test_bad_bodies(service: Any, body: dict[str, Any], code: str, param: str | None) -> None:
    answer = await serve(service).post("/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404), answer.text
    if code != "invalid_value":
        assert error["code"] == code, error
    assert param is None or error["param"] == param


async def test_each_model_has_its_routes(service: Any) -> None:
    http = serve(service, make_service(Path("deployments/demo/model"), "demo"))
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "input": "a"}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        answer = await http.post(path, json=chat | {"prompt": "a", "max_tokens": 4})
        assert answer.status_code == 404 and "/v1/embeddings" in answer.text, answer.text
        assert "model_not_supported" in answer.text or path == "/v1/messages"
    answer = await http.post("/v1/embeddings", json={"model": "demo", "input": "a"})
    assert answer.status_code == 404 and "/v1/chat/completions" in answer.text
    assert answer.json()["error"]["code"] == "model_not_supported"
    answer = await http.post("/classify", json={"model": "tiny", "input": "a"})
    assert answer.json()["error"]["code"] == "model_not_supported"
    both = await http.post(
        "/v1/completions", json={"model": "demo", "prompt": "2 + 2 =", "max_tokens": 2}
    )
    assert both.status_code == 200
    counted = await http.post("/tokenize", json={"model": "tiny", "prompt": "the cat"})
    assert counted.json()["count"] == 3
