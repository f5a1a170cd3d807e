"""What Ray's users ask for: tests hold each row of the table in docs/from-ray.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TRANSLATE = "tests/deployments/rayllm/test_translate.py"
RAY_HOME = "tests/e2e/test_ray_home.py"

HELD: dict[str, tuple[str, ...]] = {
    "59681 52745 52746": (
        "tests/actors/scheduler/test_engine.py::test_one_message_per_client_and_step",
        "tests/deployments/edge/test_reply_socket.py::test_what_streams_say_in_one_turn_is_one_write",
    ),
    "54070 61263": (
        "tests/deployments/client/test_pool.py::test_health_is_progress",
        f"{TRANSLATE}::test_samples_mean_what_they_mean_to_ray",
    ),
    "61219": (
        "tests/deployments/test_failover.py::test_a_lost_engine_is_one_line_of_the_log",
        "tests/deployments/test_failover.py::test_every_token_once",
    ),
    "59986 59522": (
        "tests/e2e/test_ray_data.py::test_each_row_is_answered_once_though_an_actor_is_killed",
        "tests/deployments/rayllm/test_data_names.py"
        "::test_columns_have_rays_names_and_a_bad_row_ends_the_job_or_not",
    ),
    "55369 59578": (f"{TRANSLATE}::test_keys_of_a_runtime_env_are_keys_of_the_api",),
    "54812": (f"{RAY_HOME}::test_variables_reach_every_process_of_a_model",),
    "53795 57919": (
        f"{TRANSLATE}::test_samples_mean_what_they_mean_to_ray",
        "tests/deployments/text/parsing/test_detect.py::test_a_template_is_its_format",
    ),
    "53315 52499": (
        "tests/deployments/api/test_adapters.py"
        "::test_the_folder_is_listed_in_rays_form_loaded_or_not",
        f"{TRANSLATE}::test_buckets_are_sources",
        "tests/actors/buckets/test_store.py::test_adapters_in_buckets",
    ),
    "58485": (f"{TRANSLATE}::test_serve_builds_its_configuration",),
    "55631 64965": (f"{RAY_HOME}::test_every_api_is_there",),
    "60664 4445 63065": (
        "tests/e2e/test_models.py::test_both_answer_and_one_sleeps_at_zero",
        f"{RAY_HOME}::test_a_model_answers_beside_a_broken_one",
    ),
    "51891": (
        f"{TRANSLATE}::test_a_changed_model_leaves_the_others_deployment_as_it_is",
        f"{RAY_HOME}::test_one_of_two_models_changed_leaves_the_other_as_it_is",
    ),
    "61551 59071 63585 58360": (
        "tests/deployments/serve/test_autoscaling.py"
        "::test_requests_over_an_operators_target_want_another_engine",
        "tests/e2e/test_metrics.py::test_acceptance_numbers",
    ),
    "65259": (
        "tests/deployments/api/test_edge_settings.py::test_middleware_of_the_operator",
        f"{TRANSLATE}::test_samples_mean_what_they_mean_to_ray",
    ),
    "4366 55247": (
        f"{TRANSLATE}::test_samples_mean_what_they_mean_to_ray",
        "tests/e2e/test_two_nodes.py"
        "::test_two_nodes_read_buckets_once_and_engines_lie_where_they_should",
    ),
}


def test_the_page_has_a_row_for_each() -> None:
    page = (ROOT / "docs" / "from-ray.md").read_text(encoding="utf-8")
    table = page.partition("## What Ray's users ask for")[2].partition("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| [")]
    assert [" ".join(re.findall(r"/(?:issues|pull)/(\d+)", row)) for row in rows] == list(HELD)


@pytest.mark.parametrize("issues", HELD)
def test_each_is_held_by_tests(issues: str) -> None:
    for place in HELD[issues]:
        file, _, name = place.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), place
