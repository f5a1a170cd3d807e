"""The order in which the mechanisms of ``actors/timing.py`` fire."""

import re
from pathlib import Path

import pytest

import rayfin.actors.timing as t
from rayfin.deployments.serve.server_args import ServerArgs

ROOT = Path(__file__).resolve().parents[2]
DEFINITION = re.compile(r"^(_?(?:[A-Z0-9]+_)*SECONDS)\b[^=\n]*=", re.MULTILINE)

EXCEPTIONS = {
    # The load generator measures a server from outside; its patience is no part of the system.
    "deployments/bench/endpoint.py": {"CONNECT_SECONDS", "READ_SECONDS"},
    # Measurements and targets that no process waits for.
    "actors/scheduler/policy/multi_step.py": {"CALL_SECONDS"},
    "actors/scheduler/queues/queue_limits.py": {"WINDOW_SECONDS", "SAMPLE_SECONDS"},
    "deployments/serve/autoscaling.py": {"TTFT_SECONDS"},
}

HUNG_SCHEDULER = t.MISSED_PULSES * (t.PULSE_SECONDS + t.PULSE_ANSWER_SECONDS)
"""Until a supervisor replaces a scheduler that answers no pulse."""

SERVE_STRIKES = 3
"""Health checks in a row that fail before Serve replaces a replica."""


@pytest.mark.parametrize(
    ("period", "lease", "times"),
    [
        (t.HEARTBEAT_SECONDS, t.ENGINE_SILENT_SECONDS, 3),
        (t.SILENCE_TICK_SECONDS, t.HEARTBEAT_SECONDS, 2),
        (t.LEASE_RENEWAL_SECONDS, t.CLIENT_LEASE_SECONDS, 3),
        (t.RUNNER_PING_SECONDS, t.PING_PATIENCE_SECONDS, 3),
        (t.RUNNER_PING_SECONDS, t.RUNNER_LEASE_SECONDS, 3),
        (t.SPARE_TURN_SECONDS + t.RUNNER_PING_SECONDS, t.RUNNER_LEASE_SECONDS, 3),
        (t.PULSE_SECONDS, t.SUPERVISOR_CLAIM_SECONDS, 3),
        (t.PULSE_ANSWER_SECONDS, t.SUPERVISOR_LEASE_SECONDS, 3),
        (t.LIFELINE_POLL_SECONDS, t.HUB_LEASE_SECONDS, 10),
        (t.LIFELINE_POLL_SECONDS, t.RUNNER_LEASE_SECONDS, 10),
        (t.WAIT_SLICE_SECONDS, t.LOOP_STUCK_SECONDS, 3),
        (t.HUB_REPORT_SECONDS, t.HUB_SILENT_SECONDS, 3),
        (t.HUB_REPORT_SECONDS, t.HUB_LEASE_SECONDS, 3),
        (t.HUB_PULL_SECONDS, t.HUB_SILENT_SECONDS, 3),
        (t.RESPONSE_STORE_POLL_SECONDS, t.RESPONSE_OWNER_SECONDS, 2),
        (t.STEP_RESEND_PAUSE_SECONDS, t.STEP_RESEND_SECONDS, 3),
    ],
)
def test_a_lease_outlasts_several_of_its_periods(period: float, lease: float, times: int) -> None:
    assert times * period <= lease


def test_clients_leave_a_hung_scheduler_before_it_is_replaced() -> None:
    assert t.ENGINE_SILENT_SECONDS < HUNG_SCHEDULER
    assert t.ENGINE_SILENT_SECONDS < t.LOOP_STUCK_SECONDS


def test_a_hung_scheduler_is_replaced_before_its_runners_exit() -> None:
    assert HUNG_SCHEDULER < t.RUNNER_LEASE_SECONDS
    assert t.RUNNER_ADOPTION_SECONDS < t.RUNNER_LEASE_SECONDS


def test_requests_wait_until_a_hung_scheduler_is_replaced() -> None:
    server = ServerArgs()
    assert HUNG_SCHEDULER < server.engine_timeout < server.replay_timeout


def test_a_hung_idle_runner_is_replaced_before_it_would_exit() -> None:
    assert t.RUNNER_PING_SECONDS + t.PING_PATIENCE_SECONDS < t.RUNNER_LEASE_SECONDS


def test_a_spare_that_hangs_delays_a_restart_less_than_a_process_that_does_not_start() -> None:
    assert t.SPARE_ANSWER_SECONDS < t.RUNNER_PROCESS_SECONDS < t.SPARE_WARM_SECONDS
    assert t.SPARE_ANSWER_SECONDS < t.LOOP_STUCK_SECONDS


def test_a_supervisor_is_replaced_before_its_engine_leaves() -> None:
    serve = SERVE_STRIKES * (t.SERVE_HEALTH_PERIOD_SECONDS + t.SERVE_HEALTH_TIMEOUT_SECONDS)
    assert serve + t.SUPERVISOR_CLAIM_SECONDS < t.SUPERVISOR_LEASE_SECONDS


def test_runners_exit_before_a_scheduler_without_a_supervisor() -> None:
    assert t.RUNNER_LEASE_SECONDS < t.SUPERVISOR_LEASE_SECONDS


def test_a_stuck_client_keeps_its_lease_for_longer_than_one_that_has_died() -> None:
    assert t.CLIENT_LEASE_SECONDS < t.CLIENT_STUCK_SECONDS


def test_tokens_are_kept_until_the_client_of_a_dead_ingress_can_resume() -> None:
    assert t.CLIENT_LEASE_SECONDS + t.ENGINE_SILENT_SECONDS < t.TOKEN_LOG_SECONDS


def test_steps_are_limited_in_order() -> None:
    assert (
        t.STEP_RESEND_SECONDS
        < t.MIN_STEP_LIMIT_SECONDS
        < t.LATER_FIRST_STEPS_LIMIT_SECONDS
        < t.FIRST_STEPS_LIMIT_SECONDS
        < t.PEER_STEP_SECONDS  # ranks wait for longer than the scheduler does
        < t.MODEL_LOAD_SECONDS
    )
    assert t.FIRST_RESTART_PAUSE_SECONDS < t.MAX_RESTART_PAUSE_SECONDS
    assert t.MIN_STEP_LIMIT_SECONDS < t.ENGINE_STALL_SECONDS


def test_a_killed_process_is_gone_before_its_loop_counts_as_stuck() -> None:
    assert t.PROCESS_POLL_SECONDS < t.PROCESS_KILL_SECONDS < t.LOOP_STUCK_SECONDS
    assert t.PROCESS_KILL_SECONDS < t.PROCESS_GONE_SECONDS
    assert t.NAME_POLL_SECONDS < t.PROCESS_GONE_SECONDS


def test_callers_wait_for_as_long_as_the_scheduler_does() -> None:
    assert t.LOOP_ANSWER_SECONDS <= t.CLIENT_ANSWER_SECONDS
    assert t.LOOP_COMMAND_SECONDS < t.CLIENT_COMMAND_SECONDS
    assert t.RESPONSE_STORE_POLL_SECONDS < t.RESPONSE_STORE_CALL_SECONDS
    assert t.RESPONSE_STORE_RETRY_SECONDS < t.RESPONSE_STORE_POLL_SECONDS


def test_an_engine_leaves_in_time() -> None:
    leave = t.HANDOVER_SETTLE_SECONDS + t.EVICTION_SECONDS + t.CLIENT_LEAVE_SECONDS
    assert leave < t.ENGINE_STOP_SECONDS
    assert t.DRAIN_POLL_SECONDS < t.EVICTION_SECONDS
    assert t.REGISTRY_REFRESH_SECONDS < t.HANDOVER_SETTLE_SECONDS < t.HANDOVER_SECONDS
    assert t.HANDOVER_POLL_SECONDS < t.HANDOVER_SETTLE_SECONDS
    assert ServerArgs().shutdown_timeout + t.ENGINE_STOP_SECONDS < t.INGRESS_DRAIN_SECONDS
    assert t.ADMIN_STOP_SECONDS + t.ADMIN_BIND_PAUSE_SECONDS < t.ADMIN_BIND_SECONDS


def test_connections_are_tried_faster_than_engines_are_given_up() -> None:
    first, longest = t.REPLAY_PAUSE_SECONDS
    assert t.RECONNECT_SECONDS < t.MAX_RECONNECT_SECONDS < t.HEARTBEAT_SECONDS
    assert first < longest
    assert t.REGISTRY_SEARCH_SECONDS < t.REGISTRY_REFRESH_SECONDS < t.ENGINE_SILENT_SECONDS


def test_a_line_of_a_batch_is_sent_again_before_its_server_is_given_up() -> None:
    first, longest = t.BATCH_PAUSE_SECONDS
    assert first < longest < t.BATCH_PATIENCE_SECONDS
    assert t.BATCH_RECORD_SECONDS < longest
    assert t.BODY_SECONDS < t.RECORDING_SECONDS < t.UPLOAD_SECONDS < t.UPLOAD_STALE_SECONDS


def test_a_scrape_returns_before_the_one_that_asked_for_it_gives_up() -> None:
    assert t.HUB_SCRAPE_SECONDS < t.INGRESS_SCRAPE_SECONDS < t.HUB_REPORT_ANSWER_SECONDS
    assert t.HUB_PULL_ANSWER_SECONDS < t.HUB_PULL_SECONDS
    assert t.HUB_REPORT_ANSWER_SECONDS < t.HUB_SILENT_SECONDS < t.HUB_LEASE_SECONDS


def test_http_clients_are_heard_of_before_they_are_given_up() -> None:
    assert t.SSE_COMMENT_SECONDS < t.STALLED_SECONDS
    assert t.CONTINUE_SECONDS < t.LINGER_SECONDS < t.HEADER_SECONDS < t.BODY_SECONDS
    assert t.SHORT_BODY_SECONDS < t.SLOW_READER_SECONDS < t.STALLED_SECONDS


def test_a_chat_template_holds_no_event_loop_for_a_heartbeat() -> None:
    assert t.INLINE_TEMPLATE_SECONDS < t.HEARTBEAT_SECONDS < t.TEMPLATE_SECONDS


def test_seconds_are_defined_in_one_place() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for room in ("actors", "deployments")
        for path in (ROOT / room).rglob("*.py")
        if path.name != "timing.py" and (names := set(DEFINITION.findall(path.read_text())))
    }
    assert found == EXCEPTIONS
