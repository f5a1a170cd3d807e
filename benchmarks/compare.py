"""Compares engines on the same requests, in turns: any model, any dataset of ``rayfin bench``.

    python benchmarks/compare.py ./my-model --peer rayfin_engine=.venv/bin/python \\
        --peer vllm_cpu=/opt/vllm/bin/python,dtype=float32
    python benchmarks/compare.py ./my-model --workload guided \\
        --peer rayfin_llm=.venv/bin/python --peer vllm_llm=/opt/vllm/bin/python

MODEL is a local folder that every engine can load. A peer is a script of peers/, its Python, and
its settings. Prints medians over the rounds and the first engine's throughput divided by each
engine's. One uncounted round warms up.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import click
from quantized import write_awq
from turns import PEERS, PeerSpec, medians, take_turns

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.bench.datasets import Pace, dataset_of, load
from rayfin.deployments.bench.measures import Figures, figures
from rayfin.deployments.cli.bench import JSON, MAX_MODEL_LEN, dataset_options, with_trace

HEADS = ("TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "ITL p99 ms")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "state": {"enum": ["open", "closed", "waiting"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "count", "state", "tags"],
    "additionalProperties": False,
}
"""What guided requests of a comparison answer, if no other schema is given."""


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@dataset_options
@click.option(
    "--peer",
    "peers",
    multiple=True,
    required=True,
    metavar="[LABEL:]NAME=PYTHON[,KEY=VALUE]...",
    help="a script in the peers folder, its Python, and its settings; the first is the baseline",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@MAX_MODEL_LEN
@click.option(
    "--request-rate",
    type=click.FloatRange(0, min_open=True),
    show_default="inf, or as a trace says",
)
@click.option(
    "--workload",
    type=click.Choice(["generate", "guided", "embed"]),
    default="generate",
    show_default=True,
    help="what the requests ask for: tokens, answers to a JSON schema, or vectors",
)
@click.option(
    "--schema",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON schema of guided answers, instead of a small one",
)
@click.option("--awq", is_flag=True, help="compare on a copy of MODEL in AWQ's 4 bits")
@JSON
def compare(
    model: Path,
    peers: tuple[str, ...],
    rounds: int,
    max_model_len: int | None,
    request_rate: float | None,
    workload: str,
    schema: Path | None,
    awq: bool,
    json_file: IO[str] | None,
    **settings: Any,
) -> None:
    """Compares engines on the same requests, in alternating rounds; MODEL is a local folder."""
    specs = [PeerSpec.parse(text, PEERS) for text in peers]
    settings = with_trace(settings)
    dataset = dataset_of(load(settings), settings, max_model_len or positions(model))
    jobs = Pace(request_rate, seed=settings["seed"]).jobs(dataset)
    if dataset.summary is not None:
        print(dataset.summary)
    if workload == "embed":
        jobs = [replace(job, output_tokens=1) for job in jobs]  # its vector
    asked = workload_of(workload, schema)
    with tempfile.TemporaryDirectory() as folder:
        if awq:
            write_awq(model, Path(folder) / "awq")
            model = Path(folder) / "awq"
        results = take_turns(specs, model, jobs, rounds, click.echo, asked)
    runs = {name: [figures(run) for run in named] for name, named in results.items()}
    title = f"{settings['dataset']}, {len(jobs)} requests" + (", AWQ" if awq else "")
    unit = "vectors" if workload == "embed" else "output tokens"
    print("\n".join(comparison(title, runs, unit)))
    if json_file is not None:
        reports = {name: [run.as_json() for run in named] for name, named in runs.items()}
        json.dump(reports, json_file, indent=2)
    raise SystemExit(any(run.failed for named in runs.values() for run in named))


def comparison(title: str, runs: Mapping[str, Sequence[Figures]], unit: str) -> list[str]:
    """Makes a Markdown table of several engines' medians over rounds.

    ``unit`` is what a request gets, tokens or vectors.
    """
    first = next(iter(runs))
    table = [
        f"**{title}**",
        "",
        f"| engine | {unit}/s | {' | '.join(HEADS)} | {first} / engine |",
        "|---" * (len(HEADS) + 3) + "|",
    ]
    rows = {name: medians(rounds) for name, rounds in runs.items()}
    for name, row in rows.items():
        ratio = rows[first][0] / row[0] if row[0] else float("nan")
        table.append(f"| {name} | {' | '.join(f'{value:.1f}' for value in row)} | {ratio:.2f} |")
    return table


def workload_of(kind: str, schema: Path | None) -> dict[str, Any] | None:
    """What peers get to hear of a workload; None for plain tokens.

    Guided answers are arrays of the schema's objects without an end, so that all engines write the
    same number of tokens.

    Raises:
        InvalidConfig: the schema is no JSON object, or the workload takes none.
    """
    if kind != "guided":
        if schema is not None:
            raise InvalidConfig("schema needs --workload guided", "schema")
        return None if kind == "generate" else {"name": kind}
    items = SCHEMA
    if schema is not None:
        try:
            items = json.loads(schema.read_text())
        except (OSError, ValueError) as error:
            raise InvalidConfig(f"{schema} is not JSON: {error}", "schema") from None
        if not isinstance(items, dict):
            raise InvalidConfig(f"{schema} is not a JSON schema", "schema")
    endless = {"type": "array", "minItems": 10_000, "items": items}
    return {"name": kind, "schema": endless}


def positions(model: Path) -> int | None:
    """Reads the context of a model from its folder."""
    try:
        config = json.loads((model / "config.json").read_text())
        config = {**config, **config.get("text_config", {})}  # of a model that reads images too
        positions = config.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return positions if isinstance(positions, int) else None


if __name__ == "__main__":
    compare()
