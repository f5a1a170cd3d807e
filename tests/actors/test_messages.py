"""What crosses actors: pickles round, errors keep their arguments, chunks are views."""

import pickle
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest

from rayfin.actors import errors
from rayfin.actors.adapters.part import AdapterFacts
from rayfin.actors.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    RayfinError,
)
from rayfin.actors.media.part import MediaFacts
from rayfin.actors.messages import (
    NO_STEP,
    Ended,
    EngineInfo,
    EngineRequest,
    NewRequest,
    Sampling,
    SchedulerInfo,
    StepResult,
    StopRules,
    TokenDelta,
    TokenDeltas,
)
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.parts import uncut_of
from rayfin.actors.settings.bidirectional import Bidirectional


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


INFO = SchedulerInfo(
    epoch=1,
    step=2,
    ids=_ints(3, 0),
    chunk_idx=_ints(0, 1),
    chunk_len=_ints(1, 3),
    merge_prompt=_ints(-1, 7, 8, 9),
    kv_len=_ints(5, 0),
    kv_page_len=_ints(2, 1),
    last_pos=_ints(0, -1),
    is_decoding=np.array([True, False]),
    decoding_batch=1,
    prefill_batch=1,
    new_pages=_ints(4),
    new_pages_len=_ints(0, 1),
    new_requests=[NewRequest(0, Sampling(0.5, 3, 0.9, 0.1, 77, (2,), 9), 12, frozenset([2]))],
    finished=[1],
)
MESSAGES = [
    INFO,
    EngineRequest("r", _ints(1, 2), Sampling(), StopRules(3, frozenset([2])), "c", 4, 1, 2.5, [9]),
    StepResult(1, 2, np.array([[5, 6], [7, -1]], np.int32), {1: "bad"}, 0.5),
    TokenDeltas(1, 2, np.array([1], np.int64), _ints(3), [Ended(1, "stop", 3)]),
    TokenDelta("r", [1, 2], "length", None, 3),
    EngineInfo("e", 10, 20, 30, 40),
    EngineStats(finished={"stop": 2}),
]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if is_dataclass(one):
        return type(one) is type(other) and all(
            _same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
        )
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_pickle(message: Any) -> None:
    assert _same(message, pickle.loads(pickle.dumps(message)))


def test_facts_of_parts_mean_the_same_in_another_process() -> None:
    parts = AdapterFacts(), MediaFacts(token_id=3, uncut=Bidirectional("image", 9))
    assert (
        uncut_of(pickle.loads(pickle.dumps(parts))) == uncut_of(parts) == Bidirectional("image", 9)
    )


def test_chunk_prompt_is_a_view() -> None:
    assert INFO.chunk_prompt(0).tolist() == [-1]
    chunk = INFO.chunk_prompt(1)
    assert chunk.tolist() == [7, 8, 9] and np.shares_memory(chunk, INFO.merge_prompt)


def test_message_outside_of_a_step() -> None:
    deltas = TokenDeltas.only(Ended(5, "error", error=RayfinError("no")))
    assert (deltas.epoch, deltas.step) == (NO_STEP, NO_STEP)
    assert len(deltas.keys) == len(deltas.tokens) == 0 and deltas.ended[0].key == 5


ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, RayfinError)
]


@pytest.mark.parametrize("error", ERRORS)
def test_errors_pickle(error: type[RayfinError]) -> None:
    made = error("what went wrong", "field")
    copy = pickle.loads(pickle.dumps(made))
    assert type(copy) is error and copy.args == made.args
    assert (copy.message, copy.param, str(copy)) == ("what went wrong", "field", "what went wrong")
    assert (copy.status, copy.type, copy.code) == (error.status, error.type, error.code)


def test_own_code_survives_pickle() -> None:
    for error in (InvalidRequest, ContextLengthExceeded):
        copy = pickle.loads(pickle.dumps(error("m", "p", "invalid_type")))
        assert copy.code == "invalid_type"
        assert error("m").code != "invalid_type"


def test_errors_travel_in_messages() -> None:
    ended = Ended(3, "error", error=InvalidRequest("bad", "prompt", "empty_prompt"))
    copy = pickle.loads(pickle.dumps(TokenDeltas.only(ended))).ended[0].error
    assert (copy.message, copy.param, copy.code) == ("bad", "prompt", "empty_prompt")


def test_statuses() -> None:
    """The tree as errors.py draws it."""
    assert {error.__name__: error.status for error in ERRORS} == {
        "RayfinError": 500,
        "InvalidRequest": 400,
        "InvalidLine": 400,
        "ContextLengthExceeded": 400,
        "ModelNotFound": 404,
        "ModelNotSupported": 404,
        "NotFound": 404,
        "NotPermitted": 403,
        "InvalidConfig": 500,
        "UnsupportedModel": 500,
        "NoRoomNow": 500,
        "RequestFailed": 500,
        "NumericalError": 500,
        "RequestQuarantined": 500,
        "Overloaded": 429,
        "RateLimited": 429,
        "MediaUnavailable": 502,
        "DeadlineExceeded": 408,
        "EngineUnavailable": 503,
        "EnginePaused": 503,
        "EngineBusy": 409,
        "EngineAsleep": 503,
        "RequestHandedBack": 503,
        "RunnerGroupFailed": 500,
        "CallLost": 500,
        "StepMissing": 500,
        "PeerLost": 500,
        "Fenced": 500,
        "NotOwner": 503,
        "EngineLost": 503,
        "NoTokenLeft": 400,
        "GrammarFailed": 400,
        "AdapterUnavailable": 503,
        "StorageFull": 507,
        "GrammarTooSlow": 400,
        "TemplateTooSlow": 400,
        "TemplateTooLong": 400,
        "ServerError": 500,
    }
