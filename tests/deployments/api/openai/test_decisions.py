"""/v1/decisions and /v1/systemone: the probabilities of labels, as an engine gives them."""

import asyncio
import math
from typing import Any

import httpx
import pytest

from rayfin.actors.messages import EngineInfo
from rayfin.deployments.text.parsing.detect import Detected
from rayfin.deployments.text.parsing.formats import find_reasoning_format

pytestmark = pytest.mark.anyio
TEAM = {"billing": "payments", "shipping": None, "security": "access"}
SYSTEM_ONE: dict[str, Any] = {
    "state": {"ticket": "My card was charged twice."},
    "instructions": "You sort tickets.",
    "questions": {
        "team": {"type": "choice", "instructions": "Which team?", "criteria": TEAM},
        "urgent": {"type": "noul", "instructions": "Now?", "criteria": {"true": "money moves"}},
        "tone": {"type": "score", "instructions": "How upset?", "criteria": ["calm", "furious"]},
    },
}
DECISION: dict[str, Any] = {
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "My card."}]}],
    "questions": [
        {"type": "predicate", "name": "urgent", "instructions": "Now?"},
        {
            "type": "choice",
            "instructions": "Intact?",
            "choices": [{"value": True, "description": "whole"}, {"value": False}],
        },
        {
            "type": "score",
            "name": "tone",
            "instructions": "How upset?",
            "levels": [{"label": "calm"}, {"label": "cross"}, {"label": "furious"}],
        },
    ],
}


CHANCES = {"A": 0.1, "B": 0.3, "C": 0.1, "0": 0.1, "1": 0.3, "2": 0.1}


@pytest.fixture(autouse=True)
def likely(engine: Any, service: Any, tokenizer: Any) -> None:
    """A model that finds B and 1 likely. Its tokens are letters: yes and no are A and B."""
    service.max_model_len = 1024
    engine.limits = EngineInfo("engine", 1024, tokenizer.vocab_size, 1000, 4)
    ids = {label: tokenizer.encode(label, False)[0] for label in CHANCES}
    engine.named = {ids[label]: math.log(chance) for label, chance in CHANCES.items()}
    engine.reply = [ids["B"]]


def about(value: Any) -> Any:
    """A reply with its numbers to three places."""
    if isinstance(value, dict):
        return {key: about(one) for key, one in value.items()}
    if isinstance(value, list):
        return [about(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


async def test_system_one(http: httpx.AsyncClient, engine: Any, tokenizer: Any) -> None:
    reply = about((await http.post("/v1/systemone", json=SYSTEM_ONE)).json())
    assert reply["answers"] == {
        "team": {
            "type": "choice",
            "choice": "shipping",
            "probabilities": {"billing": 0.2, "shipping": 0.6, "security": 0.2},
            "confidence": 0.3,
        },
        "urgent": {
            "type": "noul",
            "noul": 0.25,
            "probabilities": {"yes": 0.25, "no": 0.75},
            "confidence": 0.3,
        },
        "tone": {
            "type": "score",
            "score": 0.75,
            "legend": {"0": "calm", "1": "furious"},
            "probabilities": {"0": 0.25, "1": 0.75},
            "confidence": 0.3,
        },
    }
    assert reply["diagnostics"]["team"] == {"label_mass": 0.5, "argmax_is_label": True}
    assert not reply["diagnostics"]["tone"]["argmax_is_label"]
    assert reply["object"] == "structured_decision" and reply["usage"]["output_tokens"] == 3
    prompts = [tokenizer.decode(request.prompt.tolist(), False) for request in engine.seen]
    about_all = 'You sort tickets.\n\n{"ticket": "My card was charged twice."}\n\nQuestion: '
    assert all(about_all in prompt for prompt in prompts)
    assert "A: billing (payments)\nB: shipping\nC: security (access)\n" in prompts[0]
    assert "A: yes (money moves)\nB: no\n" in prompts[1]


async def test_decisions(http: httpx.AsyncClient) -> None:
    reply = about((await http.post("/v1/decisions", json=DECISION)).json())
    assert reply["answers"] == [
        {"type": "predicate", "name": "urgent", "probability": 0.25},
        {
            "type": "choice",
            "name": None,
            "choice": False,
            "probabilities": [
                {"value": True, "probability": 0.25},
                {"value": False, "probability": 0.75},
            ],
            "confidence": 0.3,
        },
        {
            "type": "score",
            "name": "tone",
            "score": 1.0,
            "probabilities": [
                {"value": 0, "label": "calm", "probability": 0.2},
                {"value": 1, "label": "cross", "probability": 0.6},
                {"value": 2, "label": "furious", "probability": 0.2},
            ],
            "confidence": 0.3,
        },
    ]
    assert reply["model"].endswith("tiny") and reply["usage"]["output_tokens"] == 3


def asked(**question: Any) -> dict[str, Any]:
    return {"state": "x", "questions": {"q": question}}


PICTURE = {"content": [{"type": "input_image"}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("systemone", {"state": "x"}, "questions"),
        ("systemone", {"questions": SYSTEM_ONE["questions"]}, "state"),
        ("systemone", {"state": "x", "questions": {}}, "questions"),
        ("systemone", asked(type="box"), "questions.q.type"),
        ("systemone", asked(type="noul", more=1), "questions.q.more"),
        ("systemone", asked(type="choice", criteria={}), "questions.q.criteria"),
        ("systemone", asked(type="score", criteria=["one"]), "questions.q.criteria"),
        ("systemone", asked(type="score", criteria=list("abcdefghijk")), "questions.q.criteria"),
        ("systemone", asked(type="score", criteria=["a", "a"]), "questions.q.criteria"),
        ("decisions", {**DECISION, "input": [PICTURE]}, "input[0].content[0].type"),
        ("decisions", {**DECISION, "questions": [{"type": "noul"}]}, "questions[0].type"),
        (
            "decisions",
            {**DECISION, "questions": [{"type": "predicate"}]},
            "questions[0].instructions",
        ),
        ("decisions", {**DECISION, "questions": [DECISION["questions"][0]] * 65}, "questions"),
        (
            "decisions",
            {**DECISION, "questions": [{**DECISION["questions"][1], "choices": 5}]},
            "questions[0].choices",
        ),
    ],
)
async def test_what_is_refused(http: httpx.AsyncClient, path: str, body: Any, param: str) -> None:
    response = await http.post(f"/v1/{path}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_model_that_thinks_first(http: httpx.AsyncClient, service: Any) -> None:
    """Its first token is no answer; one whose template can leave thoughts out decides."""
    service.formats = Detected(None, find_reasoning_format("qwen3"))
    for opening, status in (("<think>\n", 400), ("", 200)):
        ending = f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{opening}{{% endif %}}"
        service.chat_template = "{{ messages[0].content }}" + ending
        assert (await http.post("/v1/systemone", json=SYSTEM_ONE)).status_code == status


async def test_they_count_as_load(http: httpx.AsyncClient, engine: Any) -> None:
    engine.gate = asyncio.Event()
    asking = asyncio.create_task(http.post("/v1/decisions", json=DECISION))
    while not engine.seen:
        await asyncio.sleep(0.001)
    assert (await http.get("/load")).json() == {"server_load": 1}
    engine.gate.set()
    assert (await asking).is_success
