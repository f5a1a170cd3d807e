"""Peers are processes that take turns; ours is run for real on a tiny model."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from compare import compare, comparison, workload_of
from turns import PEERS, Peer, PeerSpec, take_turns

from pooling_models import add_modules, make_encoder
from rayfin.actors.errors import InvalidConfig, ServerError
from rayfin.deployments.bench.measures import Timeline, figures
from rayfin.deployments.bench.workload import Job, Lengths, random_jobs
from rayfin.deployments.serve.preflight import DEMO_FOLDER

pytestmark = pytest.mark.slow(reason="starts peers as processes")

ECHO = """
from peer import serve
class Echo:
    version = "echo 1"
    def __init__(self, model, settings):
        print("noise on stdout")
        if settings.get("fail"):
            raise RuntimeError("no such model")
        self.left = {}
    def add(self, index, prompt, output_tokens):
        self.left[index] = output_tokens, 2 if prompt[0] == 13 else 1
    def step(self):
        for index, (left, count) in list(self.left.items()):
            if left > 0:
                self.left[index] = left - count, count
                yield index, count
serve(Echo)
"""
"""A peer without a model; a request that begins with token 13 gets two at a time."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "peer.py").write_text((PEERS / "peer.py").read_text())
    (tmp_path / "echo.py").write_text(ECHO)
    return tmp_path


def test_a_peer_runs_jobs_at_their_times(folder: Path) -> None:
    jobs = [Job((1, 2), 3), Job((4,), 2, arrival=0.05)]
    with Peer(PeerSpec.parse(f"echo={sys.executable}", folder), folder, folder / "log") as peer:
        first, second = peer.run(jobs)
        assert peer.version == "echo 1"
        assert (first.tokens, second.tokens, second.prompt_tokens) == (3, 2, 1)
        assert second.sent == 0.05 <= second.pieces[0][0]
        assert first.error is None
        assert peer.run([Job((13,), 1)])[0].error == "received 2 of 1 tokens"
    assert "noise on stdout" in (folder / "log").read_text()


def test_a_peer_that_fails_says_why(folder: Path) -> None:
    spec = PeerSpec.parse(f"mine:echo={sys.executable},fail=1", folder)
    assert (spec.name, spec.settings) == ("mine", {"fail": 1})
    with pytest.raises(ServerError, match="no such model"):
        with Peer(spec, folder, folder / "log"):
            pass
    (folder / "echo.py").write_text("raise SystemExit('no package')")
    with pytest.raises(ServerError, match="no package"):
        with Peer(spec, folder, folder / "log"):
            pass


def test_an_unknown_peer(folder: Path) -> None:
    for wrong in ("echo", f"other={sys.executable}"):
        with pytest.raises(InvalidConfig, match="peer"):
            PeerSpec.parse(wrong, folder)


def test_peers_take_turns_on_other_tokens(folder: Path) -> None:
    specs = [PeerSpec.parse(f"{name}:echo={sys.executable}", folder) for name in "ab"]
    jobs = random_jobs(3, Lengths(2, 2), Lengths(2, 4), vocabulary=12)
    results = take_turns(specs, folder, jobs, 2, lambda _: None)
    assert {name: len(rounds) for name, rounds in results.items()} == {"a": 2, "b": 2}


def test_rayfin_and_transformers_compare(tmp_path: Path, tiny_models: Any) -> None:
    """The command on two real engines: every request gets all of its tokens."""
    tiny_models.make_tiny_model("llama", tmp_path)
    given = "--requests 3 --prompt-tokens 5-9 --output-tokens 2-4 --vocabulary 50 --rounds 1"
    peers = [
        f"rayfin_engine={sys.executable},threads=1,max_model_len=64",
        f"transformers_generate={sys.executable},threads=1",
    ]
    command = [str(tmp_path), *given.split()]
    command += ["--json", str(tmp_path / "out.json")]
    for peer in peers:
        command += ["--peer", peer]
    done = CliRunner().invoke(compare, command)
    assert done.exit_code == 0
    printed = done.output
    assert "| rayfin_engine |" in printed and "| transformers_generate |" in printed
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert [numbers[name][0]["failed"] for name in numbers] == [0, 0]
    same = {numbers[name][0]["output_tokens"] for name in numbers}
    assert len(same) == 1


def test_the_comparison_holds_medians_and_ratios() -> None:
    quick = figures([Timeline(10.0, 5, [(11.0, 1), (12.0, 2), (14.0, 1)])])
    slow = figures([Timeline(0.0, 5, [(4.0, 2), (8.0, 2)])])
    table = comparison("both", {"ours": [quick, quick, slow], "theirs": [slow]}, "tokens")
    ours, theirs = table[-2:]
    assert ours.startswith("| ours | 1.0 |") and ours.endswith("| 1.00 |")
    assert theirs.startswith("| theirs | 0.5 |") and theirs.endswith("| 2.00 |")


def test_workloads_beside_plain_tokens(tmp_path: Path) -> None:
    assert workload_of("generate", None) is None
    assert workload_of("embed", None) == {"name": "embed"}
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    guided = workload_of("guided", schema)
    assert guided is not None and guided["schema"]["items"] == {"type": "integer"}
    for kind, text in (("embed", "{}"), ("guided", "{"), ("guided", "[]")):
        schema.write_text(text)
        with pytest.raises(InvalidConfig, match="schema"):
            workload_of(kind, schema)


def test_a_peer_refuses_a_workload_that_it_lacks(folder: Path) -> None:
    spec = PeerSpec.parse(f"echo={sys.executable}", folder)
    with pytest.raises(ServerError, match="does not run embed requests"):
        with Peer(spec, folder, folder / "log", {"name": "embed"}):
            pass


def test_guided_answers_of_an_awq_copy() -> None:
    """Arrays without an end: each answer has all of its tokens."""
    flags = "--requests 3 --prompt-tokens 5-9 --output-tokens 20 --vocabulary 200 --rounds 1"
    peer = f"rayfin_llm={sys.executable},max_model_len=128,num_pages=64"
    command = [str(DEMO_FOLDER), *flags.split()]
    command += ["--awq", "--workload", "guided", "--peer", peer]
    done = CliRunner().invoke(compare, command)
    assert done.exit_code == 0
    printed = done.output
    assert "3 requests, AWQ" in printed and "| rayfin_llm |" in printed


def test_vectors(tmp_path: Path) -> None:
    add_modules(make_encoder(tmp_path, "bert"), {"pooling_mode": "mean"})
    flags = "--requests 3 --prompt-tokens 5-9 --vocabulary 30 --rounds 1 --workload embed"
    command = [str(tmp_path), *flags.split()]
    done = CliRunner().invoke(compare, [*command, "--peer", f"rayfin_llm={sys.executable}"])
    assert done.exit_code == 0 and "| engine | vectors/s |" in done.output
