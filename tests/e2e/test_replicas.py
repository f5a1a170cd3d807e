"""Two ingress replicas behind one address, and one store of responses."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import ray
from ray import serve
from ray.util import list_named_actors

from rayfin.actors.config import EngineArgs
from rayfin.deployments.app import bind_app
from rayfin.deployments.serve.server_args import ServerArgs

SERVE = "serve"  # Serve's own namespace
TTFT = "time_to_first_token_seconds_count"
TRIES = 12  # requests of which one reaches each replica


@pytest.fixture(scope="module")
def ports(free_port: Callable[[], int]) -> tuple[int, int]:
    """Of the metrics, and of the operators."""
    one = free_port()
    return one, next(other for other in iter(free_port, one))


@pytest.fixture(scope="module")
def pair(
    deploy: Callable[..., Any], served: str, settings: dict[str, Any], ports: tuple[int, int]
) -> Iterator[Any]:
    server = ServerArgs(
        ingress_replicas=2,
        metrics_alias="vllm",
        metrics_port=ports[0],
        admin_port=ports[1],
        admin_api_key="operator",
    )
    application = bind_app(server, EngineArgs(**settings))
    yield deploy(application, "pair", served, "/pair")
    serve.delete("pair")


@pytest.fixture
def client(pair: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_each_replica_knows_every_response(
    pair: Any, client: openai.OpenAI, eventually: Callable[..., Any]
) -> None:
    """Connections are balanced: with a store in each replica about half of these would fail."""
    asked: dict[str, Any] = {"model": pair.model, "temperature": 0, "max_output_tokens": 20}
    made = client.responses.create(input="What is 37 + 48?", **asked)
    for _ in range(TRIES):
        assert client.responses.retrieve(made.id) == made
        again = client.responses.create(input="And?", previous_response_id=made.id, **asked)
        assert again.usage and made.usage
        assert again.usage.input_tokens > made.usage.total_tokens
    client.responses.delete(made.id)
    for _ in range(TRIES):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)


def test_background_responses_are_followed_and_cancelled_from_anywhere(
    pair: Any, client: openai.OpenAI, eventually: Callable[..., Any]
) -> None:
    long: Any = {"ignore_eos": True}
    for _ in range(TRIES // 2):
        made = client.responses.create(
            model=pair.model, input="Say something.", background=True, extra_body=long
        )
        eventually(
            lambda own=made: client.responses.retrieve(own.id).status == "in_progress", "it runs"
        )
        assert client.responses.cancel(made.id).status == "cancelled"
        assert client.responses.retrieve(made.id).status == "cancelled"
    made = client.responses.create(
        model=pair.model, input="Count.", background=True, max_output_tokens=30, temperature=0
    )
    texts = set()
    for _ in range(TRIES // 2):
        events = list(client.responses.retrieve(made.id, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        texts.add("".join(getattr(event, "delta", "") for event in events))
        assert events[-1].type in ("response.completed", "response.incomplete")
    assert len(texts) == 1 and texts.pop() == client.responses.retrieve(made.id).output_text


def test_the_store_may_die(
    pair: Any, client: openai.OpenAI, eventually: Callable[..., Any]
) -> None:
    """Serve starts another one; what it held is lost, and nothing else."""
    asked: dict[str, Any] = {"model": pair.model, "input": "hi", "max_output_tokens": 3}
    made = client.responses.create(**asked)
    (store,) = (
        actor["name"]
        for actor in list_named_actors(all_namespaces=True)
        if "pair#responses" in actor["name"]
    )
    ray.kill(ray.get_actor(store, namespace=SERVE))
    assert client.responses.create(**asked, store=False).output_text

    def stored_again() -> str | None:
        try:
            return client.responses.create(**asked).id
        except openai.InternalServerError as error:
            assert error.status_code == 503
            return None

    again = eventually(stored_again, "there is a store")
    assert client.responses.retrieve(again).id == again
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_any_replica_tells_the_metrics_of_both(
    pair: Any, client: openai.OpenAI, ports: tuple[int, int], eventually: Callable[..., Any]
) -> None:
    """And so does the hub's own port, under vLLM's names as well."""

    def reported() -> list[float]:
        urls = [f"{pair.url}/metrics"] * TRIES + [f"http://127.0.0.1:{ports[0]}/metrics"]
        found = []
        for url in urls:
            text = httpx.get(url, timeout=120).raise_for_status().text
            for name in ("rayfin_", "vllm:"):
                lines = [own for own in text.splitlines() if own.startswith(f"{name}{TTFT}")]
                found.append(sum(float(line.split()[-1]) for line in lines))
        return found

    eventually(lambda: len(set(reported())) == 1, "all tell the same")
    before = reported()[0]
    for _ in range(TRIES):
        client.completions.create(model=pair.model, prompt="Hello", max_tokens=2)
    eventually(lambda: set(reported()) == {before + TRIES}, "all tell of the new requests")


def test_operators_have_a_port_of_their_own(
    pair: Any, client: openai.OpenAI, ports: tuple[int, int], eventually: Callable[..., Any]
) -> None:
    """Where the API knows none of their routes; a command there holds for all replicas."""
    key = {"Authorization": "Bearer operator"}
    asked: dict[str, Any] = {"model": pair.model, "prompt": "Hello", "max_tokens": 2}
    assert httpx.get(f"{pair.url}/admin/engines", headers=key).status_code == 404
    with httpx.Client(base_url=f"http://127.0.0.1:{ports[1]}", timeout=120, headers=key) as http:
        assert http.get("/admin/engines", headers={"Authorization": "Bearer x"}).status_code == 401
        assert http.get("/v1/models").status_code == 404
        (engine,) = http.get("/admin/engines").json()["engines"]
        assert engine["state"] == "ready"
        http.post("/admin/sleep").raise_for_status()

        def all_say(status: int) -> bool:
            url = f"{pair.url}/v1/completions"
            reported = [httpx.post(url, json=asked, timeout=60) for _ in range(TRIES)]
            return {answer.status_code for answer in reported} == {status}

        eventually(lambda: all_say(503), "both replicas know that it sleeps")
        http.post("/admin/wake").raise_for_status()
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
        eventually(lambda: all_say(200), "both replicas know that it is awake")
    assert client.completions.create(**asked).usage
