"""Pictures that are pasted into the page, or dropped on it."""

import base64
import io
from typing import Any

import pytest
from PIL import Image

from rayfin.actors.metrics.snapshot import EngineSnapshot

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")

GIVE = """([kind, name, base64, more]) => {
  const bytes = Uint8Array.from(atob(base64), (own) => own.charCodeAt(0));
  const given = new DataTransfer();
  const type = name.endsWith("png") ? "image/png" : "text/plain";
  given.items.add(new File([bytes, new Uint8Array(more ?? 0)], name, { type }));
  const options = { bubbles: true, cancelable: true };
  const event = kind === "drop"
    ? new DragEvent("drop", { ...options, dataTransfer: given })
    : new ClipboardEvent("paste", { ...options, clipboardData: given });
  document.getElementById(kind === "drop" ? "log" : "prompt").dispatchEvent(event);
  return event.defaultPrevented;
}"""


def png(red: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (red, 0, 0)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_pictures_go_with_the_next_message(
    url: str, page: Any, engine: Any, shown: EngineSnapshot
) -> None:
    """A click takes one off again; a message that is refused gives them back."""
    engine.shown = [shown]
    posted: list[Any] = []

    def note(request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            posted.append(request.post_data_json)

    page.on("request", note)
    page.goto(url)
    sync_api.expect(page.locator("#health")).to_have_text("serving")
    kept = page.locator("#pictures img")
    assert page.evaluate(GIVE, ["paste", "a.png", png(1)])
    sync_api.expect(kept).to_have_count(1)
    assert page.evaluate(GIVE, ["drop", "b.png", png(2)])
    sync_api.expect(kept).to_have_count(2)
    assert not page.evaluate(GIVE, ["paste", "c.txt", png(3)])
    page.click("#pictures button:nth-child(1)")
    sync_api.expect(kept).to_have_count(1)
    page.fill("#prompt", "what is it?")
    page.press("#prompt", "Enter")
    sync_api.expect(page.locator(".turn.user img")).to_have_count(1)
    sync_api.expect(page.locator(".turn.error")).to_contain_text("text only")
    sync_api.expect(kept).to_have_count(1)
    sync_api.expect(page.locator("#prompt")).to_have_value("what is it?")
    image, text = posted[0]["messages"][-1]["content"]
    assert image["image_url"]["url"] == f"data:image/png;base64,{png(2)}"
    assert text == {"type": "text", "text": "what is it?"}


def test_a_file_that_is_not_taken_is_named(
    url: str, page: Any, engine: Any, shown: EngineSnapshot
) -> None:
    """The browser stays on the page, also where no file is taken."""
    engine.shown = [shown]
    page.goto(url)
    sync_api.expect(page.locator("#health")).to_have_text("serving")
    note, kept = page.locator("#pictures-note"), page.locator("#pictures img")
    sync_api.expect(note).to_be_hidden()
    for kind in ("drop", "paste"):
        assert page.evaluate(GIVE, [kind, "large.png", png(1), 20 * 2**20])
        sync_api.expect(note).to_have_text(
            "large.png has 20.1 MiB; a picture may have at most 20 MiB."
        )
    assert page.evaluate(GIVE, ["drop", "<b>.txt", png(1)])
    sync_api.expect(note).to_have_text("<b>.txt is no picture.")
    sync_api.expect(kept).to_have_count(0)
    assert page.evaluate(GIVE, ["drop", "b.png", png(2)])
    sync_api.expect(kept).to_have_count(1)
    sync_api.expect(note).to_be_hidden()
