"""Several models behind one address: fake engines behind the real HTTP layer."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.errors import EngineUnavailable, InvalidConfig, ModelNotFound
from rayfin.actors.metrics.ledger import Ledger
from rayfin.actors.metrics.render import render
from rayfin.deployments.api.app import build_api
from rayfin.deployments.client.engine_client import EngineReport
from rayfin.deployments.generation.service import OpenAIService, ServedModels
from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.http.layers import HttpSettings
from rayfin.deployments.serve.handle_calls import HandleCalls
from rayfin.deployments.telemetry.ingress_counters import INGRESS_METRICS, IngressCounters

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/tokenize": {"prompt": "hello"},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
}
GENERATING = 4  # of them


@pytest.fixture
def second(service: OpenAIService, engine: Any, tokenizer: Any) -> OpenAIService:
    """A model with a longer context, which says what the first says from its second token on."""
    other = type(engine)(tokenizer)
    other.reply = other.reply[1:]
    return replace(
        service,
        client=other,
        model_names=["large"],
        max_model_len=1000,
        counts=IngressCounters(),
    )


@pytest.fixture
async def both(
    service: OpenAIService, second: OpenAIService, anyio_backend: str
) -> AsyncIterator[httpx.AsyncClient]:
    service.edge.admin_keys = ApiKeys.load(["operator"])
    transport = httpx.ASGITransport(build_api(service, second), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as client:
        yield client


async def test_all_are_listed(both: httpx.AsyncClient) -> None:
    cards = (await both.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"], card["max_model_len"]) for card in cards] == [
        ("org/tiny", "org/tiny", 128),
        ("tiny", "org/tiny", 128),
        ("large", "large", 1000),
    ]
    assert (await both.get("/v1/models/large")).json()["max_model_len"] == 1000
    assert (await both.get("/v1/models/huge")).status_code == 404


@pytest.mark.parametrize("path", BODIES)
async def test_the_model_of_a_request_is_asked(
    both: httpx.AsyncClient, service: OpenAIService, second: OpenAIService, path: str
) -> None:
    engines: list[Any] = [service.client, second.client]
    for name, seen in (("large", [0, 1]), ("tiny", [1, 1]), (None, [2, 1])):
        answer = await both.post(path, json=BODIES[path] | ({"model": name} if name else {}))
        assert answer.status_code == 200, answer.text
        if path in list(BODIES)[:GENERATING]:
            assert [len(engine.seen) for engine in engines] == seen
            assert answer.json()["model"] == ("large" if name == "large" else "org/tiny")
    unknown = await both.post(path, json=BODIES[path] | {"model": "huge"})
    assert unknown.status_code == 404 and "huge" in unknown.text


async def test_a_model_has_its_own_limits(both: httpx.AsyncClient) -> None:
    long = {"prompt": [5] * 200, "max_tokens": 2}
    assert (await both.post("/v1/completions", json=long | {"model": "tiny"})).status_code == 400
    assert (await both.post("/v1/completions", json=long | {"model": "large"})).status_code == 400
    tokens = await both.post("/tokenize", json={"prompt": "a", "model": "large"})
    assert tokens.json()["max_model_len"] == 1000


async def test_one_models_engines_are_no_matter_of_the_other(
    both: httpx.AsyncClient, second: OpenAIService
) -> None:
    gone: Any = second.client
    gone.refusal = gone.unhealthy = EngineUnavailable("no engine is ready")
    answers = [
        await both.post("/v1/completions", json=BODIES["/v1/completions"] | {"model": name})
        for name in ("large", "tiny")
    ]
    assert [answer.status_code for answer in answers] == [503, 200]
    assert (await both.get("/health")).status_code == 503  # the application is not whole


async def test_requests_count_for_their_model(
    both: httpx.AsyncClient, service: OpenAIService, second: OpenAIService
) -> None:
    for name in ("large", "large", "tiny"):
        await both.post("/v1/completions", json=BODIES["/v1/completions"] | {"model": name})
    await both.get("/v1/models")
    completed = [own.counts.answers["/v1/completions", "2xx"] for own in (service, second)]
    assert completed == [1, 2]
    assert [own.counts.answers["other", "2xx"] for own in (service, second)] == [1, 0]


async def test_metrics_of_all_are_one_text(
    both: httpx.AsyncClient, service: OpenAIService, second: OpenAIService
) -> None:
    for own in (service, second):

        async def metrics(own: OpenAIService = own) -> bytes:
            ledger = Ledger()
            ledger.apply(own.counts.report(), 0.0)
            return render(own.model_names[0], "vllm", ledger, INGRESS_METRICS)

        own.client.metrics = metrics  # type: ignore[method-assign]
    text = (await both.get("/metrics")).text
    heads = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(set(heads)) == len(heads)
    one = {family.name: family for family in text_string_to_metric_families(text)}
    names = [own.labels["model_name"] for own in one["rayfin_client_disconnects"].samples]
    assert names == ["org/tiny", "large"]
    buckets = one["rayfin_time_to_first_token_seconds"].samples
    assert {own.labels["model_name"] for own in buckets} == {"org/tiny", "large"}


async def test_an_operator_names_model_and_engine(
    both: httpx.AsyncClient, service: OpenAIService, second: OpenAIService
) -> None:
    clients: list[Any] = [service.client, second.client]
    for number, client in enumerate(clients):
        client.reports = [EngineReport.of("0", f"app/engine-{number}/0", None)]
    key = {"Authorization": "Bearer operator"}
    shown = (await both.get("/admin/engines", headers=key)).json()["engines"]
    assert [(own["model"], own["engine"]) for own in shown] == [("org/tiny", "0"), ("large", "0")]
    vague = await both.post("/admin/drain?engine=0", headers=key)
    assert vague.status_code == 400 and vague.json()["error"]["param"] == "model"
    assert (await both.post("/admin/drain?model=huge", headers=key)).status_code == 404
    reported = (await both.post("/admin/drain?engine=0&model=large", headers=key)).json()["engines"]
    assert [own["model"] for own in reported] == ["large"]
    assert [len(client.commands) for client in clients] == [0, 1]
    await both.post("/admin/wake", headers=key)
    assert [len(client.commands) for client in clients] == [1, 2]


def test_a_name_is_one_models(service: OpenAIService, second: OpenAIService) -> None:
    second.model_names.append("tiny")
    with pytest.raises(InvalidConfig, match="'tiny' is used twice"):
        build_api(service, second)


async def test_a_model_that_has_failed_is_503_and_joins_later(
    service: OpenAIService, second: OpenAIService, anyio_backend: str
) -> None:
    """The others answer meanwhile; requests that name none go to the first one."""
    service.edge.admin_keys = ApiKeys.load(["operator"])
    models = ServedModels([service], {"large": "has failed: its GPU is gone"})
    transport = httpx.ASGITransport(build_api(models=models), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as http:
        for path, body in BODIES.items():
            assert (await http.post(path, json=body)).status_code == 200
            failed = await http.post(path, json={**body, "model": "large"})
            assert failed.status_code == 503, path
            assert "its GPU is gone" in failed.text
        assert (await http.get("/health")).status_code == 200
        listed = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
        assert listed == [*service.model_names, "large"]
        models.join(second)
        for path, body in BODIES.items():
            assert (await http.post(path, json={**body, "model": "large"})).status_code == 200
        listed = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
        assert listed == [*service.model_names, "large"]
        headers = {"Authorization": "Bearer operator"}
        listed = (await http.get("/server_info", headers=headers)).json()["models"]
        assert [own["model"] for own in listed] == [service.name, "large"]


async def test_a_handles_calls_need_no_key_and_know_models_that_join(
    service: OpenAIService, second: OpenAIService, anyio_backend: str
) -> None:
    service.edge.keys = ApiKeys.load(["secret"])
    models = ServedModels([service], {"large": "has failed: its GPU is gone"})
    calls = HandleCalls(build_api(models=models, edge=HttpSettings(web=False)))

    async def ask(model: str) -> Any:
        body = {"model": model, "prompt": "a"}
        (answer,) = [part async for part in calls.post("/tokenize", body)]
        return answer

    assert "count" in await ask("tiny")
    assert "its GPU is gone" in str(await ask("large"))
    models.join(second)
    assert "count" in await ask("large")


def test_an_adapter_is_named_behind_a_model_whose_name_has_colons(service: OpenAIService) -> None:
    """Of two models that fit, the longer name is meant."""
    ref = AdapterRef("0" * 64, "sql:v2", "/folder")

    class Names:
        refs = {"sql:v2": ref}

    names: Any = Names()
    base = replace(service, model_names=["ft:tiny"], adapters=names)
    models = ServedModels([replace(service, model_names=["ft"]), base])
    assert models.named("ft:tiny:sql:v2").parts == (ref,)
    assert models.named("sql:v2").parts == (ref,)
    with pytest.raises(ModelNotFound):
        models.named("ft:none")
