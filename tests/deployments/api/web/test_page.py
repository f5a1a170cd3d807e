"""The page in a browser: a real conversation, a real click, the pixels of the page map."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

from rayfin.actors.messages import EngineInfo
from rayfin.actors.metrics.snapshot import FREE, EngineSnapshot, PagesView
from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.telemetry.ingress_counters import IngressCounters
from rayfin.deployments.text.parsing.detect import Detected
from rayfin.deployments.text.parsing.formats import REASONING_FORMATS, TOOL_FORMATS

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")


def limit(page: Any, tokens: str) -> None:
    """Says in the drawer how long an answer may be."""
    page.click("#settings-open")
    page.fill("#max-tokens", tokens)
    page.press("#max-tokens", "Escape")


def test_a_chat_streams(url: str, page: Any, engine: Any, shown: EngineSnapshot) -> None:
    engine.shown = [shown]
    page.goto(url)
    sync_api.expect(page.locator("#health")).to_have_text("serving")
    page.fill("#prompt", "hello there")
    page.press("#prompt", "Enter")
    sync_api.expect(page.locator(".turn.user")).to_have_text("hello there")
    sync_api.expect(page.locator(".turn.assistant")).to_contain_text("👩‍👩‍👧 مرحبا")
    sync_api.expect(page.locator(".turn.assistant small")).to_contain_text("tokens")
    page.fill("#prompt", "and again")
    page.click("#send")
    sync_api.expect(page.locator(".turn.assistant")).to_have_count(2)
    page.click("#clear")
    sync_api.expect(page.locator(".turn")).to_have_count(0)


def test_an_answer_can_be_stopped(url: str, page: Any, engine: Any, shown: EngineSnapshot) -> None:
    engine.shown, engine.delay = [shown], 0.2
    page.goto(url)
    sync_api.expect(page.locator("#health")).to_have_text("serving")
    limit(page, "100")
    page.fill("#prompt", "hello")
    page.click("#send")
    sync_api.expect(page.locator(".turn.assistant")).to_contain_text("Sure")
    page.click("#stop")
    sync_api.expect(page.locator("#send")).to_be_visible()
    sync_api.expect(page.locator(".turn.error")).to_have_count(0)


def test_an_error_is_told(url: str, page: Any, engine: Any, shown: EngineSnapshot) -> None:
    engine.shown = [shown]
    page.goto(url)
    sync_api.expect(page.locator("#health")).to_have_text("serving")
    limit(page, "99999")
    page.fill("#prompt", "hello")
    page.click("#send")
    sync_api.expect(page.locator(".turn.error")).to_contain_text("max_completion_tokens")
    sync_api.expect(page.locator("#prompt")).to_have_value("hello")  # to be sent again


def test_a_call_is_shown_as_a_call(
    url: str, page: Any, engine: Any, service: Any, shown: EngineSnapshot
) -> None:
    """With its reasoning folded; its result goes back to the model."""
    said = '<think>hm</think>Let me look.<tool_call>{"name": "get_weather", "arguments": {}}'
    engine.shown = [shown]
    engine.reply = service.tokenizer.encode(f"{said}</tool_call>", False)
    service.max_model_len = 2048
    engine.limits = EngineInfo("engine", 2048, service.tokenizer.vocab_size, 1000, 4)
    service.formats = Detected(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"])
    page.goto(url)
    page.click("#examples button:nth-child(3)")
    turns = page.locator(".turn.assistant")
    sync_api.expect(turns.locator(".call b")).to_have_text("get_weather")
    sync_api.expect(turns.locator(".call code")).to_have_text("{}")
    sync_api.expect(turns.locator(".text")).to_have_text("Let me look.")
    thought = turns.locator(".thought div")
    sync_api.expect(thought).to_be_hidden()
    turns.locator(".thought summary").click()
    sync_api.expect(thought).to_have_text("hm")
    sync_api.expect(page.locator("#send")).to_be_visible()
    assert engine.seen[0].prompt.size and "get_weather" in page.input_value("#tools")
    turns.locator(".call input").fill("sunny")
    turns.locator(".call input").press("Enter")
    sync_api.expect(turns).to_have_count(2)
    prompt = service.tokenizer.decode(engine.seen[1].prompt.tolist(), False)
    assert "tool\nsunny" in prompt


def test_the_engine_is_shown(url: str, page: Any, engine: Any, shown: EngineSnapshot) -> None:
    engine.shown = [shown]
    page.goto(url)
    rows = page.locator("#requests tbody tr")
    sync_api.expect(rows).to_have_count(3)
    sync_api.expect(rows.nth(1)).to_contain_text("#5")
    sync_api.expect(rows.nth(2)).to_contain_text("waits 0.8 s")
    sync_api.expect(page.locator("#pages-text")).to_contain_text("4 held (1 shared), 10 kept")
    sync_api.expect(page.locator("#batch-text")).to_contain_text("1 decoding, 1 prefilling")
    colors = page.evaluate(
        """() => {
          const canvas = document.getElementById("pages");
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          const seen = new Set();
          for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 4).join());
          return seen.size;
        }"""
    )
    assert colors >= 6  # free, kept, shared, two requests, the gaps
    engine.shown = [replace(shown, epoch=1, totals={**shown.totals, "requeued": 2})]
    sync_api.expect(page.locator("#events li").first).to_contain_text("2 requests replayed")
    sync_api.expect(page.locator("#events li.bad")).to_contain_text("epoch 1")


def test_engines_have_tabs(url: str, page: Any, engine: Any, shown: EngineSnapshot) -> None:
    other = replace(
        shown,
        name="app/engine/two",
        running=[],
        waiting=[],
        num_running=0,
        pages=PagesView(64, 16, [(FREE, 64)]),
    )
    engine.shown = [shown, other]
    page.goto(url)
    sync_api.expect(page.locator("#requests tbody tr")).to_have_count(3)
    page.click("#engines button:nth-child(2)")
    sync_api.expect(page.locator("#requests tbody tr")).to_have_count(0)


def test_every_model_is_shown_and_talked_to(
    service: Any,
    page: Any,
    engine: Any,
    shown: EngineSnapshot,
    tokenizer: Any,
    serving: Callable[..., AbstractContextManager[str]],
) -> None:
    other = type(engine)(tokenizer)
    engine.shown = [shown]
    large = replace(service, client=other, model_names=["large"], counts=IngressCounters())
    idle = replace(large, client=type(engine)(tokenizer), model_names=["idle"])
    other.shown = [replace(shown, name="app/engine-large/one", num_waiting=0, waiting=[])]
    rows = page.locator("#requests tbody tr")
    with serving(service, large, idle) as url:
        page.goto(url)
        sync_api.expect(page.locator("#models option")).to_have_text(["org/tiny", "large", "idle"])
        sync_api.expect(rows).to_have_count(3)
        page.select_option("#models", "large")
        sync_api.expect(rows).to_have_count(2)
        page.fill("#prompt", "hello")
        page.press("#prompt", "Enter")
        sync_api.expect(page.locator(".turn.assistant small")).to_contain_text("tokens")
        assert len(other.seen) == 1 and not engine.seen
        page.select_option("#models", "idle")
        sync_api.expect(rows).to_have_count(0)
        sync_api.expect(page.locator("#health")).to_have_text("no engine")
        engine.shown = [replace(shown, epoch=1)]  # what happens to the others is shown as well
        sync_api.expect(page.locator("#events li.bad")).to_contain_text("epoch 1")
        page.select_option("#models", "org/tiny")
        sync_api.expect(rows).to_have_count(3)
        page.goto("about:blank")  # the server ends before the browser here


def test_it_asks_for_a_key(
    service: Any, request: pytest.FixtureRequest, page: Any, engine: Any, shown: EngineSnapshot
) -> None:
    engine.shown, service.edge.keys = [shown], ApiKeys.load(["secret"])
    page.goto(request.getfixturevalue("url"))
    sync_api.expect(page.locator("#health")).to_have_text("needs a key")
    page.fill("#key", "secret")
    page.click("#key-form button")
    sync_api.expect(page.locator("#health")).to_have_text("serving")
    sync_api.expect(page.locator("#key-form")).to_be_hidden()
    page.goto("about:blank")  # the server ends before the browser here


def test_the_drawer_says_how_to_answer(
    url: str, page: Any, engine: Any, service: Any, shown: EngineSnapshot
) -> None:
    """And what it says lasts as long as the tab, in sight below the message."""
    engine.shown = [shown]
    page.goto(url)
    page.click("#settings-open")
    page.fill("#system", "Speak like a pirate.")
    page.fill("#temperature", "0.5")
    page.fill("#seed", "7")
    page.fill("#tools", "{")
    sync_api.expect(page.locator("#tools-error")).to_be_visible()
    page.fill("#tools", "")
    sync_api.expect(page.locator("#tools-error")).to_be_hidden()
    page.press("#tools", "Escape")
    sync_api.expect(page.locator("#settings")).to_be_hidden()
    page.reload()
    chips = ["system prompt", "temperature 0.5", "seed 7"]
    sync_api.expect(page.locator("#chips button")).to_have_text(chips)
    page.fill("#prompt", "hello")
    page.click("#send")
    sync_api.expect(page.locator(".turn.assistant small")).to_contain_text("tokens")
    request = engine.seen[0]
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 7)
    prompt = service.tokenizer.decode(request.prompt.tolist(), False)
    assert "system\nSpeak like a pirate." in prompt
    page.click("#chips button:first-child")
    page.click("#reset")
    sync_api.expect(page.locator("#chips button")).to_have_count(0)


def test_an_answer_is_asked_for_again(
    url: str, page: Any, engine: Any, shown: EngineSnapshot
) -> None:
    engine.shown = [shown]
    page.goto(url)
    page.click("#examples button:first-child")
    sync_api.expect(page.locator(".turn.assistant small")).to_contain_text("tokens")
    page.click(".again")
    sync_api.expect(page.locator(".turn.assistant small")).to_contain_text("tokens")
    sync_api.expect(page.locator(".turn")).to_have_count(2)
    first, second = engine.seen
    assert first.prompt.tolist() == second.prompt.tolist()
    page.click("#clear")
    sync_api.expect(page.locator("#welcome")).to_be_visible()


@pytest.mark.parametrize("width", [360, 390, 768])
def test_a_phone_shows_one_thing_at_a_time(
    url: str, page: Any, engine: Any, shown: EngineSnapshot, width: int
) -> None:
    engine.shown = [shown]
    page.set_viewport_size({"width": width, "height": 700})
    page.goto(url)
    sync_api.expect(page.locator("#live")).to_be_hidden()
    sync_api.expect(page.locator("#send")).to_be_in_viewport()
    wide = "document.documentElement.scrollWidth > innerWidth"
    assert not page.evaluate(wide)
    page.click("#views [data-view=live]")
    sync_api.expect(page.locator("#chat")).to_be_hidden()
    sync_api.expect(page.locator("#requests tbody tr")).to_have_count(3)
    assert not page.evaluate(wide)


def test_lines_fill_their_tiles(url: str, page: Any, engine: Any, shown: EngineSnapshot) -> None:
    """From the second state on, from edge to edge."""
    engine.shown = [shown]
    page.goto(url)
    page.wait_for_function(
        """() => ["rate-line", "step-line"].every((id) => {
          const { width, height } = document.getElementById(id);
          const pen = document.getElementById(id).getContext("2d");
          const drawn = (x) => pen.getImageData(x, 0, 1, height).data.some((value) => value);
          return drawn(0) && drawn(width >> 1) && drawn(width - 1);
        })"""
    )
