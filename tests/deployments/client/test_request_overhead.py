"""The way between ingress and engine, from what each of them has measured."""

from rayfin.actors.messages import TokenDelta
from rayfin.deployments.client.pool import RequestOverheadTimer


def reported(first_token: float | None) -> TokenDelta:
    return TokenDelta("r", [3], "length", first_token=first_token)


def test_what_the_engine_did_not_need_was_the_way() -> None:
    transit = RequestOverheadTimer(100.0)
    assert transit.observe(TokenDelta("r", []), 100.5) is None  # log probabilities of the prompt
    assert transit.observe(TokenDelta("r", [1]), 102.0) is None
    assert transit.observe(TokenDelta("r", [2]), 103.0) is None
    assert transit.observe(reported(1.25), 104.0) == 0.75


def test_an_answer_of_one_message() -> None:
    assert RequestOverheadTimer(100.0).observe(reported(0.5), 100.75) == 0.25


def test_nothing_is_known_of_the_others() -> None:
    """An engine that says nothing, a request without a token, clocks of different speed."""
    assert RequestOverheadTimer(100.0).observe(reported(None), 101.0) is None
    assert (
        RequestOverheadTimer(100.0).observe(TokenDelta("r", [], "abort", first_token=1.0), 101.0)
        is None
    )
    assert RequestOverheadTimer(100.0).observe(reported(1.5), 101.0) == 0.0
