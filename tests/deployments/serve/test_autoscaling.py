"""How many engines are wanted: a pure function, and Serve's own machinery around it."""

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.deployments.app import bind_app
from rayfin.deployments.serve.autoscaling import (
    TTFT_SECONDS,
    WAITING_TOKENS,
    AutoscalingReport,
    autoscaling,
    wanted,
)
from rayfin.deployments.serve.server_args import ServerArgs

ENGINE = DeploymentID("engine", "app")


@pytest.mark.parametrize(
    ("reports", "engines"),
    [
        ({}, 1),
        ({"waiting_tokens": [0.0], "page_share": [0.0], "ttft": [0.0]}, 1),
        ({"waiting_tokens": [WAITING_TOKENS]}, 1),
        ({"waiting_tokens": [WAITING_TOKENS + 1]}, 2),
        ({"waiting_tokens": [5 * WAITING_TOKENS, 0.0]}, 5),
        ({"page_share": [0.9]}, 2),
        ({"page_share": [0.45, 0.45]}, 2),  # the same work, spread: no engine more or less
        ({"page_share": [0.3, 0.3, 0.1]}, 1),
        ({"ttft": [3 * TTFT_SECONDS], "page_share": [0.9]}, 3),  # the scarcest decides
        ({"somebody_elses": [1e9]}, 1),
        ({"busy": [0.0, 0.0], "page_share": [0.0, 0.0]}, 0),
        ({"busy": [0.0, 0.2], "page_share": [0.0, 0.0]}, 1),  # there was work a moment ago
    ],
)
def test_engines_for_the_work(reports: dict[str, list[float]], engines: int) -> None:
    assert wanted(reports) == engines


def test_the_queue_at_the_pace_so_far() -> None:
    report = AutoscalingReport()
    first = report.update(EngineStats(waiting_tokens=900, prompt_tokens=1000), 10.0)
    assert first == {"waiting_tokens": 900.0, "page_share": 0.0, "ttft": 0.0, "busy": 1.0}
    now = 10.0
    prompts = 1000
    for _ in range(30):  # 100 tokens a second are admitted, and come
        now += 2.0
        prompts += 200
        last = report.update(EngineStats(waiting_tokens=900, prompt_tokens=prompts), now)
    assert last["ttft"] == pytest.approx(9.0, rel=0.01)
    idle = report.update(EngineStats(pages_held=16, pages_total=64, prompt_tokens=prompts), now + 1)
    assert idle == {"waiting_tokens": 0.0, "page_share": 0.25, "ttft": 0.0, "busy": 0.0}


def test_requests_over_an_operators_target_want_another_engine() -> None:
    report = AutoscalingReport(ongoing_requests=8)
    look = report.update(EngineStats(running=9, waiting=3), 1.0)["ongoing"]
    assert look == 1.5
    assert wanted({"ongoing": [look]}) == 2
    assert wanted({"ongoing": [0.5, 0.5]}) == 1


def test_short_requests_between_two_looks_are_work() -> None:
    report = AutoscalingReport()
    looks = [(0, 0), (0, 0), (5, 0), (5, 3), (5, 3)]  # prompt tokens and tokens so far
    taken = [
        report.update(EngineStats(prompt_tokens=prompts, generation_tokens=tokens), float(now))
        for now, (prompts, tokens) in enumerate(looks)
    ]
    assert [own["busy"] for own in taken] == [1.0, 0.0, 1.0, 1.0, 0.0]


def context(config: AutoscalingConfig, waiting: dict[str, float]) -> AutoscalingContext:
    replicas = {ReplicaID(name, ENGINE): value for name, value in waiting.items()}
    return AutoscalingContext(
        deployment_id=ENGINE,
        deployment_name="engine",
        app_name="app",
        current_num_replicas=2,
        target_num_replicas=2,
        running_replicas=list(replicas),
        total_num_requests=0,
        total_queued_requests=0,
        aggregated_metrics={"waiting_tokens": replicas},
        raw_metrics={},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=config,
    )


def test_serve_takes_the_policy() -> None:
    """Its own schema, and its own import of the function by name."""
    config = AutoscalingConfig(**autoscaling(1, 4, 300.0))
    policy = config.policy.get_policy()
    assert policy(context(config, {"a": 3 * WAITING_TOKENS, "b": 1.0}))[0] == 4
    assert policy(context(config, {}))[0] == 2  # no engine has reported


def test_flags() -> None:
    def deployed(**settings: int) -> AutoscalingConfig | int:
        app = bind_app(ServerArgs(**settings), EngineArgs())
        engine = app._bound_deployment.init_args[3][0]._bound_deployment
        own = engine._deployment_config
        return own.autoscaling_config or own.num_replicas

    assert deployed(data_parallel_size=3) == 3
    scaled = deployed(max_engines=4, data_parallel_size=2)
    assert isinstance(scaled, AutoscalingConfig)
    assert (scaled.min_replicas, scaled.max_replicas, scaled.initial_replicas) == (2, 4, 2)
    for bad in ({"min_engines": 1}, {"max_engines": 0}, {"min_engines": 3, "max_engines": 2}):
        with pytest.raises(InvalidConfig):
            ServerArgs(**bad)
    asleep = deployed(min_engines=0, max_engines=2)
    assert isinstance(asleep, AutoscalingConfig)
    assert (asleep.min_replicas, asleep.initial_replicas, asleep.downscale_delay_s) == (0, 1, 300)
    with pytest.raises(InvalidConfig, match="max_engines must be at least 1"):
        ServerArgs(min_engines=0, max_engines=0)


def test_batches_start_engines_only_if_they_may() -> None:
    stats = EngineStats(
        **{"waiting_tokens": 10, "background_waiting_tokens": 9000, "running": 3},
        **{"pages_total": 100, "pages_held": 90, "background_pages": 80},
    )
    apart, together = (AutoscalingReport(own).update(stats, 1.0) for own in (False, True))
    assert (apart["waiting_tokens"], apart["page_share"]) == (10.0, 0.1)
    assert (together["waiting_tokens"], together["page_share"]) == (9010.0, 0.9)
    assert apart["busy"] == together["busy"] == 1.0
