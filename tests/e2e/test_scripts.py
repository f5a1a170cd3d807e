"""What people run against vLLM: the curl of its quick start, and what Open WebUI asks."""

import json
import shutil
import subprocess
from typing import Any

import pytest

QUESTION = {"role": "user", "content": "What is 12 + 30?"}
ANSWER = "12 + 30 = 42"


def run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=600)
    return done.stdout.decode()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_of_vllms_quick_start(app: Any) -> None:
    def curl(path: str, body: dict[str, Any] | None = None) -> Any:
        data = [] if body is None else ["-H", "Content-Type: application/json", "-d"]
        data += [] if body is None else [json.dumps({"model": app.model, **body})]
        return json.loads(run("curl", "--silent", "--fail", f"{app.url}{path}", *data))

    assert curl("/v1/models")["data"][0]["id"] == app.model
    body = {"prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0}
    reply = curl("/v1/completions", body)
    assert 1 <= reply["usage"]["completion_tokens"] <= 7 and reply["choices"][0]["text"]
    system = {"role": "system", "content": "You are a helpful assistant."}
    reply = curl("/v1/chat/completions", {"messages": [system, QUESTION], "temperature": 0})
    assert reply["choices"][0]["message"]["content"] == ANSWER


def test_what_open_webui_asks(app: Any) -> None:
    """A connection to an OpenAI API: its models, a streamed chat, a title, tags of an Ollama."""
    with app.client() as http:
        http.headers["Authorization"] = "Bearer none"
        models = http.get("/v1/models").raise_for_status().json()
        assert models["object"] == "list" and models["data"][0]["owned_by"]
        chat = {
            "model": app.model,
            "messages": [QUESTION],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "frequency_penalty": 0,
            "user": "c0ffee",
            "metadata": {"chat_id": "1", "features": {"web_search": False}},
        }
        with http.stream("POST", "/v1/chat/completions", json=chat) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = [line for line in answer.iter_lines() if line.startswith("data: ")]
            lines = [event.removeprefix("data: ") for event in events]
        assert lines.pop() == "[DONE]"
        chunks = [json.loads(line) for line in lines]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
        assert chunks[-1]["usage"]["total_tokens"] and chunks[-1]["choices"] == []
        title = {**chat, "stream": False, "max_completion_tokens": 50}
        del title["stream_options"]
        reply = http.post("/v1/chat/completions", json=title).raise_for_status().json()
        assert reply["choices"][0]["message"]["content"] == ANSWER
        assert http.get("/api/version").raise_for_status().json()["version"]
        tags = http.get("/api/tags").raise_for_status().json()["models"]
        assert [tag["name"] for tag in tags] == [app.model]
        refused = http.get("/ollama/api/tags")
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "unknown_url"
