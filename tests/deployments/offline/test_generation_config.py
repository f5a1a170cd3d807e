"""Where answers end, and how they are sampled, is what transformers' ``generate`` reads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from rayfin import LLM, SamplingParams
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.model_files.files import end_token_ids, generation_config
from rayfin.deployments.generation.build_requests import SAMPLING_DEFAULTS, sampling_defaults
from rayfin.deployments.serve.preflight import end_tokens

Make = Callable[..., Any]
PROMPT, MORE = [3 + 7 * i % 100 for i in range(20)], 12
FIRST, SECOND, THIRD = 2, 5, 8
"""Places in the answer whose tokens are made to end it."""

FILES = [{}, {"eos_token_id": None}, {"eos_token_id": SECOND}, {"eos_token_id": [THIRD, SECOND]}]
CONFIGS = [*FILES[:2], {"eos_token_id": FIRST}, {"eos_token_id": [FIRST, THIRD]}]
COMBINATIONS = [
    *((file, config) for file in (None, *FILES) for config in CONFIGS),
    (None, {"text_config": {"eos_token_id": FIRST, "temperature": 0.5, "top_k": 3}}),
    (None, {"eos_token_id": SECOND, "decoder": {"eos_token_id": FIRST, "top_p": 0.5}}),
    (None, {"top_k": 7, "temperature": None, "text_config": {"top_k": 9, "temperature": 0.7}}),
    (None, {"temperature": 0.3, "max_new_tokens": 5, "repetition_penalty": 1.5, "min_p": 0.25}),
    ({"top_p": 0.5}, {"temperature": 0.3, "eos_token_id": FIRST}),
    ({"eos_token_id": SECOND}, {"text_config": {"eos_token_id": FIRST}}),
]


def write(folder: Path, file: dict[str, Any] | None, config: dict[str, Any]) -> None:
    held = json.loads((folder / "config.json").read_text())
    held.pop("eos_token_id", None)
    (folder / "config.json").write_text(json.dumps(held | config))
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if file is not None:
        path.write_text(json.dumps(file))


@pytest.mark.parametrize(("file", "config"), COMBINATIONS)
def test_the_values_are_those_of_transformers(
    file: dict[str, Any] | None, config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path, file, config)
    try:
        expected: Any = GenerationConfig.from_pretrained(tmp_path)
    except OSError:  # as a model does, from_pretrained
        expected = GenerationConfig.from_pretrained(
            tmp_path, config_file_name="config.json", _from_model_config=True
        )
    values = generation_config(tmp_path)
    ends = expected.eos_token_id or []
    assert end_token_ids(values) == set(ends if isinstance(ends, list) else [ends])
    for name in ("bos_token_id", "pad_token_id", *SAMPLING_DEFAULTS):
        assert values.get(name) == getattr(expected, name)
    defaults = {own: values[name] for name, own in SAMPLING_DEFAULTS.items() if values.get(name)}
    assert sampling_defaults(tmp_path) == defaults


@pytest.mark.parametrize(
    ("file", "config"),
    [
        ({"eos_token_id": SECOND}, {"eos_token_id": FIRST}),
        ({"eos_token_id": [THIRD, SECOND]}, {"eos_token_id": [FIRST]}),
        ({"eos_token_id": None}, {"eos_token_id": FIRST}),
        ({}, {"eos_token_id": FIRST}),
        (None, {"eos_token_id": [SECOND, FIRST]}),
    ],
)
def test_an_answer_ends_where_generate_ends(
    file: dict[str, Any] | None, config: dict[str, Any], tiny_model: Make, tmp_path: Path
) -> None:
    tiny = tiny_model("llama")
    folder = Path(shutil.copytree(tiny.folder, tmp_path / "copy"))
    answer = tiny.greedy(PROMPT, MORE)

    def placed(values: dict[str, Any] | None) -> dict[str, Any] | None:
        """With the tokens in place of their places."""
        ends = None if values is None else values.get("eos_token_id")
        if values is None or ends is None:
            return values
        each = [answer[place] for place in (ends if isinstance(ends, list) else [ends])]
        return {"eos_token_id": each if isinstance(ends, list) else each[0]}

    write(folder, placed(file), placed(config) or {})
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=MORE, do_sample=False)
    with LLM(str(folder), skip_tokenizer_init=True, dtype="float32", num_pages=32) as llm:
        params = SamplingParams(temperature=0, max_tokens=MORE)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert output.outputs[0].token_ids == tokens[0, len(PROMPT) :].tolist()


def test_the_flags_say_whose_values_count(tmp_path: Path) -> None:
    """ "vllm" leaves out sampling defaults alone; a folder and changes go before the model's."""
    other = tmp_path / "other"
    other.mkdir()
    write_one = (tmp_path, {"eos_token_id": 3, "top_k": 4}), (other, {"eos_token_id": [5, 6]})
    for folder, values in write_one:
        (folder / "generation_config.json").write_text(json.dumps(values))
    args = EngineArgs(model=str(tmp_path), tokenizer=str(other))
    assert end_tokens("auto", None, args) == end_tokens("vllm", {"top_k": 9}, args) == {3}
    assert end_tokens(str(other), None, args) == {5, 6}
    assert end_tokens("auto", {"eos_token_id": 7}, args) == {7}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(InvalidConfig, match="not valid JSON"):
        end_tokens("auto", None, args)
