"""The simulated users: what they measure, what they count, and what the command reports."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import users
from click.testing import CliRunner, Result
from rich.console import Console
from users import UserLoad, UsersPlan, run_live, summary_lines, users_table

from rayfin.deployments.bench.measures import Spread, Timeline, figures

pytestmark = pytest.mark.slow(reason="simulates users for seconds")

PAUSE = 0.03  # seconds before each piece of text


class Stream(httpx.AsyncByteStream):
    """Three words, some time apart; the events do not end where the network's pieces do."""

    def __init__(self, ending: str = "data: [DONE]\n\n") -> None:
        words = (json.dumps({"choices": [{"delta": {"content": c}}]}) for c in "abc")
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": 5}})
        self._events = [*(f"data: {word}\n\n" for word in words), f"data: {usage}\n\n", ending]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b": a comment\n\n"
        for event in self._events:
            await asyncio.sleep(PAUSE)
            middle = len(event) // 2
            yield event[:middle].encode()
            yield event[middle:].encode()


def answer(request: httpx.Request) -> httpx.Response:
    said = json.loads(request.content)["messages"][-1]["content"]
    if said == "refused":
        return httpx.Response(503, json={"error": {"message": "starting"}})
    if said == "unreachable":
        raise httpx.ConnectError("no")
    if said == "dropped":
        raise httpx.ReadError("gone")
    return httpx.Response(200, stream=Stream("" if said == "cut" else "data: [DONE]\n\n"))


def run(plan: UsersPlan) -> UserLoad:
    async def go() -> UserLoad:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://x/v1") as client:
            load = UserLoad(client, plan)
            await load.run()
            return load

    return asyncio.run(go())


def answered(load: UserLoad) -> int:
    return sum(user.done for user in load.users)


def asking(*said: str) -> users.DrawMessages:
    """Asks these in turn, all users together."""
    left = list(said)
    return lambda rng: [{"role": "user", "content": left.pop(0) if left else "hello"}]


def test_one_request_is_measured() -> None:
    (timeline,) = run(UsersPlan(model="m", ask=asking(), users=1, requests=1)).timelines
    assert (timeline.tokens, timeline.error) == (5, None)  # the server's count
    assert timeline.ttft is not None and timeline.e2el is not None
    assert PAUSE <= timeline.ttft < timeline.e2el
    assert len(timeline.gaps) == 2 and min(timeline.gaps) > PAUSE / 2
    assert timeline.e2el >= 5 * PAUSE


def test_the_requests_are_shared_out() -> None:
    load = run(UsersPlan(model="m", ask=asking(), users=3, requests=7))
    assert answered(load) == len(load.timelines) == 7
    assert all(user.done >= 2 and user.state == "done" for user in load.users)
    first, _, third, *_ = sorted(load.timelines, key=lambda own: own.sent)
    assert third.sent < first.pieces[-1][0]  # at the same time
    assert load.users[0].mean_gap is not None and load.users[0].tokens == 5 * load.users[0].done


def test_fewer_requests_than_users() -> None:
    assert answered(run(UsersPlan(model="m", ask=asking(), users=4, requests=2))) == 2


def test_duration_ends_the_run() -> None:
    load = run(UsersPlan(model="m", ask=asking(), users=2, duration=0.2, think_time=0.01, seed=3))
    assert 2 <= answered(load) <= 4
    assert load.elapsed >= 0.2  # the answer under way was awaited


def test_failures_are_counted_not_timed() -> None:
    said = ("refused", "unreachable", "dropped", "cut", "hello", "refused")
    load = run(UsersPlan(model="m", ask=asking(*said), users=2, requests=6))
    assert load.errors == {
        "HTTP 503: starting": 2,
        "cannot connect": 1,
        "the connection broke off (ReadError)": 1,
        "the stream broke off before its end": 1,
    }
    totals = figures(load.timelines)
    assert (totals.requests, totals.failed, totals.errors) == (1, 5, load.errors)
    assert totals.ttft.p50 == totals.ttft.p99 and totals.e2el.p50 == totals.e2el.p99
    assert (answered(load), sum(user.failed for user in load.users)) == (1, 5)


def test_users_ask_differently_but_repeatably() -> None:
    asked: list[str] = []

    def remember(rng: random.Random) -> users.Messages:
        asked.append(str(rng.random()))
        return [{"role": "user", "content": "refused"}]

    for seed in (1, 1, 2):
        run(UsersPlan(model="m", ask=remember, users=2, requests=2, seed=seed))
    first, second, other = (set(asked[i : i + 2]) for i in (0, 2, 4))
    assert first == second and len(first) == 2 and not first & other


def test_prompts() -> None:
    rng = random.Random(0)
    for ask in (users.questions(), users.random_words(20)):
        messages = [ask(rng) for _ in range(50)]
        assert all(m[-1]["role"] == "user" and m[-1]["content"] for m in messages)
        assert len({str(m) for m in messages}) > 20
    assert len(users.random_words(20)(rng)[0]["content"].split()) == 10


def test_percentiles() -> None:
    times = Spread.of([float(n) for n in range(100, 0, -1)])
    assert (times.p50, times.p90, times.p99, times.mean) == (50.0, 90.0, 99.0, 50.5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 7.0)
    assert Spread.of([]) == Spread(None, None, None, None)


def test_summary_as_lines_and_as_a_table() -> None:
    load = UserLoad(httpx.AsyncClient(), UsersPlan(model="m", ask=asking(), users=40))
    load.count(load.users[0], Timeline(0.0, 0, [(0.25, 1), (0.26, 1), (0.28, 1)], ended=0.5))
    for number in range(7):
        load.count(load.users[1], Timeline(0.0, error=f"broken {number}"))
    text = "\n".join(summary_lines(load))
    assert "40 users of m: 1 requests" in text and "7 failed" in text
    assert "TTFT     p50 250.0 ms" in text and "p99 20.0 ms" in text
    assert "broken 0" in text and "broken 6" not in text and "failed 2 x otherwise" in text
    console = Console(file=StringIO(), width=100, height=30)
    console.print(users_table(load, console.height))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "and 22 more users" in shown and "250.0 ms" in shown and "waiting" in shown


def test_the_live_table_follows_the_run() -> None:
    async def go() -> tuple[UserLoad, str]:
        console = Console(file=StringIO(), width=100, height=30, force_terminal=True)
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://x/v1") as client:
            load = UserLoad(client, UsersPlan(model="m", ask=asking(), users=2, requests=4))
            await run_live(load, console)
        return load, console.file.getvalue()  # type: ignore[attr-defined]

    load, shown = asyncio.run(go())
    assert answered(load) == 4
    assert "2 users of m" in shown and "waiting" in shown


def command(line: str) -> Result:
    return CliRunner().invoke(users.users, line.split())


def test_command(fake_server: Any, tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    done = command(
        f"--url {fake_server.url} --users 4 --requests 12 --temperature 0 --json {file} "
        "--ignore-eos --max-tokens 9 --api-key K"
    )
    assert done.exit_code == 0
    assert "4 users of tiny: 12 requests" in done.output and "0 failed" in done.output
    assert len(fake_server.bodies) == 12 and fake_server.most_at_once > 1
    assert {body["max_tokens"] for body in fake_server.bodies} == {9}
    assert fake_server.bodies[0]["ignore_eos"] is True and set(fake_server.keys) == {"Bearer K"}
    numbers = json.loads(file.read_text())
    assert (numbers["requests"], numbers["failed"], numbers["tokens"]) == (12, 0, 84)
    assert 0.01 <= numbers["ttft"]["p50"] <= numbers["request_latency"]["p99"]


def test_command_with_failures(fake_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "questions", lambda: asking("hello", "fail", "error"))
    done = command(f"--url {fake_server.url} --users 1 --requests 3")
    assert done.exit_code == 1
    assert "1 requests" in done.output and "2 failed" in done.output
    assert "failed 1 x: HTTP 429: The queue is full." in done.output
    assert "failed 1 x: The engine died." in done.output
    assert fake_server.bodies[0]["max_tokens"] == 128 and "temperature" not in fake_server.bodies[0]


def test_command_with_random_words(fake_server: Any) -> None:
    line = f"--url {fake_server.url} --users 2 --duration 0.05 --prompt-tokens 30"
    assert command(line).exit_code == 0
    said = [body["messages"][0]["content"] for body in fake_server.bodies]
    assert len(said) >= 2 and len(set(said)) == len(said) and len(said[0].split()) == 15
