"""Which files the page takes, and what it says of the others: without a browser."""

import base64
import json
import shutil
import subprocess
from typing import Any

import pytest

from rayfin.deployments.api.web_page import FOLDER

NODE = shutil.which("node")
MEBIBYTE = 2**20
DRIVER = """
const { Pictures } = await import("data:text/javascript;base64,SOURCE");
const field = () => ({
  heard: {}, classList: { add() {}, remove() {} }, hidden: true, textContent: "",
  addEventListener(name, listener) { this.heard[name] = listener; },
  replaceChildren(...own) { this.shown = own.length; }, append() {},
});
globalThis.document = { createElement: field };
globalThis.FileReader = class {
  addEventListener(name, listener) { this.loaded = listener; }
  readAsDataURL(file) { this.result = file.name; this.loaded(); }
};
const [shelf, note, drop, paste] = [field(), field(), field(), field()];
const pictures = new Pictures(shelf, note, drop, paste);
const said = [];
for (const [kind, files] of EVENTS) {
  let prevented = false;
  const given = { files, types: files.length ? ["Files"] : ["text/plain"] };
  const event = { dataTransfer: given, clipboardData: given };
  event.preventDefault = () => { prevented = true; };
  (kind === "drop" ? drop : paste).heard[kind](event);
  said.push([prevented, note.textContent, pictures.count]);
}
pictures.take();
said.push([false, note.textContent, pictures.count]);
console.log(JSON.stringify(said));
"""


def file(name: str, size: int, kind: str = "image/png") -> dict[str, Any]:
    return {"name": name, "size": size, "type": kind}


def give(*events: tuple[str, list[dict[str, Any]]]) -> list[tuple[bool, str, int]]:
    """Gives files to the page's code: for each event whether the page took it from the browser,
    what it says, and how many pictures it has; then the same once a message has taken those."""
    source = base64.b64encode((FOLDER / "pictures.js").read_bytes()).decode()
    code = DRIVER.replace("SOURCE", source).replace("EVENTS", json.dumps(events))
    command = [NODE or "", "--input-type=module", "-e", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [tuple(own) for own in json.loads(done.stdout)]


@pytest.mark.skipif(NODE is None, reason="there is no node")
def test_a_file_that_is_not_taken_is_named() -> None:
    large = file("large.png", 20 * MEBIBYTE + 1)
    exact, text = file("exact.png", 20 * MEBIBYTE), file("a.txt", 3, "text/plain")
    too_large = "large.png has 20.1 MiB; a picture may have at most 20 MiB."
    no_picture = "a.txt is no picture."
    assert give(
        ("drop", [large]),
        ("paste", [large]),
        ("drop", [text, exact]),
        ("paste", [text]),  # the field's own
        ("drop", []),
        ("paste", [exact, file("", 24 * MEBIBYTE)]),
    ) == [
        (True, too_large, 0),
        (True, too_large, 0),
        (True, no_picture, 1),
        (False, no_picture, 1),
        (False, no_picture, 1),
        (True, "The picture has 24 MiB; a picture may have at most 20 MiB.", 2),
        (False, "", 0),
    ]
