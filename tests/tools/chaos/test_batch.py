"""What a batch's files say against its lines."""

from typing import Any

from batch import answered_once, line_of, record_of
from history import check
from load import Ask, Asks
from oracle import HashOracle

ASKS = [Asks(3).line(), Asks(4).long_prompt(4)]


def _answer(ask: Ask, *, lost: int = 0) -> dict[str, Any]:
    (expected,) = HashOracle().expect([ask])
    right = expected.choices[0]
    choice = {
        **{"index": 0, "text": right.text, "finish_reason": right.finish_reason},
        "token_ids": right.tokens[: len(right.tokens) - lost],
    }
    body = {"choices": [choice]}
    return {"custom_id": ask.name, "response": {"status_code": 200, "body": body}}


def _batch(done: int = 2, **more: Any) -> dict[str, Any]:
    counts = {"total": 2, "completed": done, "failed": 0}
    return {"status": "completed", "request_counts": counts, **more}


def test_a_line_is_the_request_of_its_ask() -> None:
    line = line_of(ASKS[0], "demo")
    assert (line["custom_id"], line["url"]) == (ASKS[0].name, "/v1/completions")
    assert line["body"]["seed"] == ASKS[0].seed and "stream" not in line["body"]


def test_whole_files_say_nothing() -> None:
    assert answered_once(ASKS, _batch(), [_answer(ask) for ask in ASKS]) == []


def test_lost_doubled_and_strange_answers_are_seen() -> None:
    first, second = (_answer(ask) for ask in ASKS)
    assert answered_once(ASKS, _batch(1), [first]) == [f"{ASKS[1].name}: 0 answers"]
    assert answered_once(ASKS, _batch(3), [first, first, second]) == [f"{ASKS[0].name}: 2 answers"]
    strange = {**first, "custom_id": "who"}
    assert answered_once(ASKS, _batch(3), [first, second, strange]) == [
        "answers of no line: ['who']"
    ]
    assert "2 answers" in answered_once(ASKS, _batch(1), [first, second])[0]
    failed = _batch(status="failed")
    assert answered_once(ASKS, failed, [first, second]) == ["the batch is failed"]


def test_texts_are_held_to_the_oracle() -> None:
    ask = ASKS[0]
    (expected,) = HashOracle().expect([ask])
    record = record_of(ask, _answer(ask))
    assert record.answered and check(record, expected, record.started) == []
    (violation,) = check(record_of(ask, _answer(ask, lost=1)), expected, record.started)
    assert violation.kind == "lost"
    assert record_of(ask, None).failed
