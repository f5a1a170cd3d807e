"""Where keys come from, whose they are, and that they are not kept."""

import pickle
from pathlib import Path

import pytest

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.app import AppArgs, build_app, edge_settings
from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.serve.server_args import ServerArgs


def test_every_key_of_a_list_is_good() -> None:
    keys = ApiKeys.load(["one", "two,three"])
    assert keys is not None
    names = [keys.tenant(f"Bearer {key}") for key in ("one", "two", "three")]
    assert len(set(names)) == 3 and all(name and name.startswith("key-") for name in names)
    for header in ("", "one", "Bearer", "Bearer ", "Bearer four", "Basic one", "Bearer one,two"):
        assert keys.tenant(header) is None


def test_a_file_names_tenants(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who may\nalice: a-key\n\nalice:next-key\nbob:b:key\nplain\n")
    keys = ApiKeys.load(["flag"], str(file))
    assert keys is not None
    owners = {"a-key": "alice", "next-key": "alice", "b:key": "bob"}
    assert {key: keys.tenant(f"bearer  {key}") for key in owners} == owners
    assert keys.tenant("Bearer plain") and keys.tenant("Bearer flag")


def test_tenants_of_nameless_keys_last_and_differ() -> None:
    first, again, other = (ApiKeys.load([key]) for key in ("one", "one", "two"))
    assert first and again and other
    assert first.tenant("Bearer one") == again.tenant("Bearer one") != other.tenant("Bearer two")


def test_without_a_source_there_are_no_keys() -> None:
    assert ApiKeys.load() is None and ServerArgs().api_keys() is None


@pytest.mark.parametrize("key", ["", "a,,b", "with blank", "schlüssel", "a\nb", "x" * 5000])
def test_malformed_keys_are_refused(key: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        ServerArgs(api_key=key)
    assert error.value.param == "api_key"


@pytest.mark.parametrize("content", [b"", b"# comment\n", b"bad name:key\n", b"\xff\xfe", b"a:\n"])
def test_bad_files_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(InvalidConfig):
        ServerArgs(api_key_file=str(file))


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(InvalidConfig) as error:
        ServerArgs(api_key_file="/nowhere/keys")
    assert error.value.param == "api_key_file" and "/nowhere/keys" in str(error.value)


def test_one_key_cannot_have_two_owners(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:same\nbob:same\n")
    with pytest.raises(InvalidConfig, match="alice and bob"):
        ApiKeys.load(file=str(file))


def test_nothing_that_is_sent_to_a_replica_holds_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = edge_settings(ServerArgs(api_key="canary-of-a-key"))
    assert b"canary" not in pickle.dumps(settings) and "canary" not in repr(settings)
    monkeypatch.setenv("VLLM_API_KEY", "canary-of-a-key")
    for args in (AppArgs(), AppArgs(api_key=["canary-of-a-key"])):
        app = build_app(args)
        server, (model,), edge, *_ = app._bound_deployment.init_args
        assert edge.keys.tenant("Bearer canary-of-a-key") is not None
        assert isinstance(model.engine, EngineArgs)
        assert "canary" not in repr((server, model, edge))
