"""Lines of an input file: what is one, what is not, and in how much memory."""

import io
import json
from typing import Any

import pytest

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.batches import lines
from rayfin.deployments.batches.lines import Line, LineReader, id_hash, parse_line

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def _bytes(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def test_a_line_is_read() -> None:
    assert parse_line(3, _bytes()) == Line(3, "a", "/v1/completions", {"prompt": "x"})


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        (b"nonsense", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b"\0", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (b'{"custom_id": ' + b"9" * 10_000 + b"}", "invalid_json_line", None),
        (None, "line_too_long", None),
        (b"{}", "invalid_line", "custom_id"),
        (_bytes(custom_id=""), "invalid_line", "custom_id"),
        (_bytes(custom_id=7), "invalid_line", "custom_id"),
        (_bytes(custom_id="x" * 513), "invalid_line", "custom_id"),
        (_bytes(custom_id="\ud800"), "invalid_line", "custom_id"),
        (_bytes(method="GET"), "invalid_line", "method"),
        (_bytes(url="/admin/engines"), "invalid_line", "url"),
        (_bytes(url=["/v1/completions"]), "invalid_line", "url"),
        (_bytes(body="x"), "invalid_line", "body"),
        (_bytes(body={"stream": True}), "invalid_line", "body.stream"),
        (_bytes(url="/v1/responses", body={"background": True}), "invalid_line", "body.background"),
    ],
)
def test_a_bad_line_is_refused_by_its_field(
    data: bytes | None, code: str, param: str | None
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_line(1, data)
    assert (refusal.value.code, refusal.value.param) == (code, param)


def test_blank_lines_marks_and_line_ends_are_skipped() -> None:
    file = io.BytesIO(b"\xef\xbb\xbf{}\r\n\r\n  \n[]\n1")
    assert list(LineReader(file)) == [(1, b"{}"), (4, b"[]"), (5, b"1")]


class _Counted(io.BytesIO):
    """Notes the largest piece that was read."""

    largest = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        data = super().readline(size)
        self.largest = max(self.largest, len(data))
        return data


def test_a_long_line_is_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
    file = _Counted(b"x" * 50_000 + b"\n{}\n" + b"y" * 1000 + b"\n" + b"z" * 999 + b"\n")
    found = [(number, data and len(data)) for number, data in LineReader(file)]
    assert found == [(1, None), (2, 2), (3, None), (4, 999)]
    assert file.largest <= 1001


def test_a_seed_depends_on_the_batch_and_the_line_alone() -> None:
    line = parse_line(1, _bytes())
    seed = line.prepared("b")["seed"]
    assert line.prepared("b")["seed"] == seed and 0 <= seed < 2**63
    assert line.prepared("c")["seed"] != seed
    assert parse_line(1, _bytes(custom_id="b")).prepared("b")["seed"] != seed
    assert parse_line(1, _bytes(body={"seed": 4})).prepared("b") == {"seed": 4}
    assert Line(1, "a", "/v1/embeddings", {}).prepared("b") == {}
    assert Line(1, "a", "/v1/responses", {}).prepared("b") == {"store": False}
    assert len(id_hash("a")) == 16
