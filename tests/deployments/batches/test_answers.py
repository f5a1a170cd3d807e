"""Output files: whole lines only, whatever a crash has left."""

import json
from pathlib import Path

import pytest

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.batches.answers import AnswerFile, Known, LineAnswer
from rayfin.deployments.batches.lines import id_hash

ANSWERS = [
    LineAnswer("a", 1, 200, "r1", {"usage": {"completion_tokens": 3}}),
    LineAnswer("b", 2, 400, "r2", {"error": {"message": "no"}}),
    LineAnswer(None, 3, error={"code": "invalid_json_line", "message": "…"}),
    LineAnswer("ü", 4, 200, "r4", "text"),
]


def _write(path: Path) -> bytes:
    file = AnswerFile.open(path, Known())
    file.append(b"".join(answer.line() for answer in ANSWERS))
    file.close()
    return path.read_bytes()


def test_an_answer_has_the_form_of_openai() -> None:
    value = json.loads(ANSWERS[0].line())
    assert value.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "r1", "body": {"usage": {"completion_tokens": 3}}}
    assert value == {"custom_id": "a", "response": response, "error": None}
    assert ANSWERS[0].tokens == 3 and ANSWERS[3].tokens == 0
    assert json.loads(ANSWERS[2].line())["error"]["line"] == 3


def test_a_file_cut_at_any_byte_holds_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out"
    whole = _write(path)
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        known = Known()
        file = AnswerFile.open(path, known)
        lines = sum(end <= size for end in ends)
        assert path.stat().st_size == ([0, *ends][lines])
        assert known.ids == {id_hash(name) for name in ["a", "b", "", "ü"][:lines] if name}
        assert known.numbers == ({3} if lines > 2 else set())
        assert (known.ok, known.failed) == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 2)][lines]
        file.append(b"{}\n")
        file.close()
        assert path.read_bytes() == whole[: [0, *ends][lines]] + b"{}\n"


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text('{"custom_id": "a"}\n')
    with pytest.raises(InvalidConfig, match="line 1 of .* is no answer"):
        AnswerFile.open(path, Known())
    assert path.read_text() == '{"custom_id": "a"}\n'


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    file = AnswerFile.open(path, Known())
    file.append(b'{"a": 1}\n')

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        file.append(b'{"b": 2}\n')
    monkeypatch.undo()
    assert path.read_bytes() == b'{"a": 1}\n'
    file.append(b'{"c": 3}\n')
    file.close()
    assert path.read_bytes() == b'{"a": 1}\n{"c": 3}\n'
