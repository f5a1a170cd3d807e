"""Rows through an engine in this process, against ``LLM``."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from pooling_models import TEXTS, make_encoder
from rayfin import LLM, SamplingParams
from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.rayllm.data_config import RayfinConfig
from rayfin.deployments.rayllm.row_engine import RowEngine

SMALL = {"kv_cache_memory": 2**26}
SUMS = [f"What is {i} + {i * 7 % 50}?" for i in range(12)]


@pytest.fixture(scope="module")
def engine() -> Iterator[RowEngine]:
    params = {"temperature": 0, "max_tokens": 12}
    made = RowEngine(RayfinConfig(engine=SMALL, sampling_params=params))
    yield made
    made.close()


def test_rows_have_the_answers_of_llm_in_their_order(engine: RowEngine) -> None:
    """Batches that overlap do not mix; a bad row has an error, and the others run."""
    talks = [[{"role": "user", "content": text}] for text in SUMS]
    rows = [{"messages": talk} for talk in talks]
    bad = {"prompt": "a", "sampling_params": {"max_tokens": -1}}

    async def both() -> list[list[dict[str, object]]]:
        return list(await asyncio.gather(engine.answer([*rows, bad]), engine.answer(rows[::-1])))

    first, second = asyncio.run(both())
    llm = LLM(threads=1, **SMALL)
    outputs = llm.chat(talks, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    texts = [own.outputs[0].text for own in outputs]
    assert [row["generated_text"] for row in first] == [*texts, None]
    assert [row["generated_text"] for row in second] == texts[::-1]
    tokens = [list(own.outputs[0].token_ids) for own in outputs]
    assert [row["token_ids"] for row in second] == tokens[::-1]
    assert [row["error"] for row in first[:-1]] == [None] * len(rows)
    assert first[-1]["error"] == "max_tokens must be at least 1, got -1."


def test_a_row_that_is_computed_again_has_the_same_text(engine: RowEngine) -> None:
    row = {"prompt": "Once", "sampling_params": {"temperature": 1.5, "max_tokens": 20}}
    again = [asyncio.run(engine.answer([row, {"prompt": "x"}, row])) for _ in range(2)]
    assert again[0] == again[1]
    assert again[0][0]["token_ids"] != again[0][2]["token_ids"]


def test_vectors_and_scores_are_those_of_llm(tmp_path: Path) -> None:
    folder = str(make_encoder(tmp_path / "bert"))
    llm, engine = LLM(folder, threads=1), RowEngine(RayfinConfig(model=folder, task="embed"))
    try:
        rows = asyncio.run(engine.answer([{"prompt": text} for text in TEXTS]))
    finally:
        engine.close()
    expected = [own.outputs.embedding for own in llm.embed(TEXTS, use_tqdm=False)]
    assert [row["embedding"].tolist() for row in rows] == expected
    assert [row["error"] for row in rows] == [None] * len(TEXTS)


def test_a_model_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(InvalidConfig):
        RowEngine(RayfinConfig(model="/nowhere/at/all"))
