"""The sections of docs/benchmarks/core.md: at toy size, and what must hold at any size."""

import sys
from collections.abc import Callable
from pathlib import Path

import core
import core_scheduler
import pytest
from core_report import Report
from core_scheduler import Rayfin, Vllm, measure, prompt, queue_case, steps_case

pytestmark = pytest.mark.slow(reason="runs every section once")

FAKE_PEER = """
import json, sys
print(json.dumps({"version": "0"}), flush=True)
for line in sys.stdin:
    case = json.loads(line)
    calls = case.get("steps") or case["calls"]
    times = dict.fromkeys(("schedule", "update", "add", "abort"), [1.0] * calls)
    names = ("schedule", "update") if case["kind"] == "steps" else ("add", "abort")
    print(json.dumps({name: times[name] for name in names}), flush=True)
"""


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path, draw=False)


def test_v1_trades_the_first_token_against_stalls() -> None:
    outcomes = core.stalls(4, 1, 150)
    longest = {name: max(max(v.gaps) for v in out.visits[:4]) for name, out in outcomes.items()}
    first = {name: out.visits[-1].ttft for name, out in outcomes.items()}
    assert longest["V1, 512"] < longest["V1, 2,048"] < longest["V0"]
    assert first["V0"] < first["V1, 2,048"] < first["V1, 512"]


def test_common_prefixes_are_computed_once() -> None:
    half, none = core.shared(0.5, caching=True, requests=6), 1000 + 6 * 1000
    assert half.prompt_tokens - none <= 6 * 16  # the rest of a page that is not full
    for share, caching in ((0.5, False), (0.0, True)):
        outcome = core.shared(share, caching=caching, requests=6)
        assert outcome.prompt_tokens == 6 * core.PROMPT
        assert core.hit_share(outcome) == 0


def test_conversations_that_do_not_fit_push_each_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "CONVERSATION_PAGES", 600)
    fit, too_many = (core.conversations(n, caching=True, turns=3) for n in (4, 24))
    assert len(too_many.visits) == 24 * 3
    assert core.hit_share(too_many) < core.hit_share(fit)


@pytest.mark.parametrize("way", core.WAYS)
def test_fewer_pages_preempt_and_everyone_gets_done(way: str) -> None:
    load = core.Load(24)
    wanted = [visit.max_tokens for visit in load.visits()]
    ample, scarce = (core.squeeze(load, way, pages) for pages in (4000, 300))
    assert ample.preemptions == 0 < scarce.preemptions
    assert scarce.rate < ample.rate
    assert (scarce.swapped_pages > 0) == ("swap" in way)
    for outcome in (ample, scarce):
        assert [len(visit.times) for visit in outcome.visits] == wanted


def test_prompts_of_cases_begin_with_other_tokens() -> None:
    heads = {tuple(prompt(name)[:2]) for name in range(11_024)}
    assert len(heads) == 11_024
    assert {len(prompt(name)) for name in range(64)} == set(range(100, 116))


@pytest.mark.parametrize("settings", [{}, {"in_flight": 1}, {"waiting": 60, "churn": True}])
def test_cases_give_a_time_for_each_step(settings: dict[str, int]) -> None:
    answer = Rayfin().ask(steps_case(6, steps=8, **settings))  # type: ignore[arg-type]
    assert len(answer["step"]) == 8


def test_queue_cases_give_a_time_for_each_call() -> None:
    answer = Rayfin().ask(queue_case(30, calls=10))
    assert {what: len(times) for what, times in answer.items()} == {"add": 10, "abort": 10}


@pytest.fixture
def fake_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "peer.py"
    path.write_text(FAKE_PEER)
    monkeypatch.setattr(core_scheduler, "PEER", path)
    return path


def test_a_peer_answers_beside_ours(fake_peer: Path) -> None:
    with Vllm(sys.executable) as peer:
        costs = measure({"Rayfin": Rayfin(), "peer": peer}, steps_case(2, steps=3), rounds=2)
    assert costs["peer"]["step"].p50 == 2.0
    assert costs["Rayfin"]["step"].p99 >= costs["Rayfin"]["step"].p50


def test_a_peer_that_does_not_start_is_told(fake_peer: Path) -> None:
    fake_peer.write_text("raise SystemExit(1)")
    with pytest.raises(RuntimeError, match=r"no answer from.*peer\.py"):
        Vllm(sys.executable)


@pytest.mark.parametrize("with_peer", [False, True])
def test_scheduler_section(report: Report, with_peer: bool, fake_peer: Path) -> None:
    core_scheduler.write(report, vllm_python=sys.executable if with_peer else None, toy=True)
    assert ("| ratio |" in report.markdown) == with_peer
    assert ("make bench-core VLLM_PYTHON=" in report.markdown) != with_peer
    assert report.markdown.count("### ") == report.markdown.count("\n| ---") == 3


@pytest.mark.parametrize("write", [core.write_versions, core.write_prefix, core.write_preemption])
def test_sections_have_tables_and_say_what_they_mean(
    report: Report, write: Callable[..., None]
) -> None:
    write(report, toy=True)
    assert report.markdown.startswith("## ")
    assert "| --- |" in report.markdown and "nan" not in report.markdown


def test_executors_section(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"inline": [100.0, 200.0], "ray": [80.0, 150.0]}
    monkeypatch.setattr(core, "compare_executors", lambda *_, **__: rates)
    core.write_executors(report)
    assert "| built-in, 2M parameters | 150 | 115 | 0.775 | 0.90 |" in report.markdown
    assert "built-in, 2M parameters: **missed**" in report.markdown


def test_introduction_names_machine_and_sections(report: Report) -> None:
    core.introduction(report)
    for name in core.sections(None):
        assert f"`{name}`" in report.markdown
    assert core.machine() in report.markdown
