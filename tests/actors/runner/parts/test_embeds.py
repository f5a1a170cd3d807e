"""Greedy tokens of prompts that are embeddings are transformers' own, on every way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from peft_adapters import make_adapter, ref_of
from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.media.part import ROWS, EmbedsFacts, EmbedsInput
from rayfin.actors.media.virtual_ids import row_ids
from rayfin.actors.runner.loading import load
from rayfin.actors.runner.parts.embeds import EmbedsPart
from rayfin.kernels.cpu.library import try_load
from vision_models import VisionModel

Make = Callable[..., Any]
Pieces = list[list[int] | torch.Tensor]

OUTPUT = 6
FAMILIES = ["llama", "gemma2", "gemma3_text", "granite", "gpt2", "mixtral", "deepseek_v3", "mamba2"]


class Embedded:
    """A tiny model that answers embeddings."""

    def __init__(self, tiny: Any) -> None:
        self.folder: Path = tiny.folder
        self.greedy = tiny.greedy
        self._model = tiny.model

    def rows(self, count: int, seed: int = 0) -> torch.Tensor:
        """Embeddings [count, hidden] of no token."""
        generator = torch.Generator().manual_seed(seed)
        own = self._model.get_input_embeddings()
        ids = torch.randint(3, 120, (2, count), generator=generator)
        with torch.inference_mode():
            rows: torch.Tensor = (own(ids[0]) + own(ids[1])) / 2
        return rows.clone()

    def embedded(self, pieces: Pieces) -> torch.Tensor:
        """Rows of a prompt of which some pieces are tokens."""
        own = self._model.get_input_embeddings()
        with torch.inference_mode():
            rows = [own(torch.tensor(p)) if isinstance(p, list) else p for p in pieces]
        return torch.cat(rows).clone()

    def answer(self, rows: torch.Tensor, max_tokens: int) -> list[int]:
        """What ``generate`` of transformers says to them."""
        return answer(self._model, rows, max_tokens)

    def copy(self) -> Any:
        """The model once more."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)


def answer(model: Any, rows: torch.Tensor, max_tokens: int) -> list[int]:
    """The greedy tokens of a model of transformers."""
    output = model.generate(
        inputs_embeds=rows.unsqueeze(0),
        attention_mask=torch.ones(1, len(rows), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0].tolist()
    return tokens


@pytest.fixture
def llama(tiny_model: Make) -> Embedded:
    return Embedded(tiny_model("llama"))


def _request(request_of: Make, key: int, rows: torch.Tensor, output: int = OUTPUT) -> Any:
    return _mixed(request_of, key, [rows], output)


def _mixed(request_of: Make, key: int, pieces: Pieces, output: int = OUTPUT) -> Any:
    """A request whose prompt has tokens and embeddings."""
    ids: list[int] = []
    embeds: list[EmbedsInput] = []
    for piece in pieces:
        if isinstance(piece, list):
            ids += piece
            continue
        array = piece.numpy()
        embeds.append(EmbedsInput({ROWS: array}, len(array), "float32", len(ids)))
        ids += row_ids(array, "float32").tolist()
    made = request_of(key, ids, output, eos=(2,))
    made.parts = tuple(embeds)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_transformers_own(
    family: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Beside tokens, in one batch, cut by chunks of 16."""
    tiny = Embedded(tiny_model(family))
    engine = served(tiny.folder, enable_prompt_embeds=True, max_batch_tokens=16)
    assert engine.config.parts == (EmbedsFacts(size=32),)
    prompts = {key: tiny.rows(count, key) for key, count in enumerate((1, 5, 23))}
    text = list(range(40, 60))
    requests = [_request(request_of, key, rows) for key, rows in prompts.items()]
    tokens = engine.run(*requests, request_of(9, text, OUTPUT, eos=(2,)))
    expected = {key: tiny.answer(rows, OUTPUT) for key, rows in prompts.items()}
    assert tokens == {**expected, 9: tiny.greedy(text, OUTPUT)}
    assert len({tuple(own) for own in tokens.values()}) > 1, "the embeddings change nothing"


def _pieces(tiny: Embedded) -> dict[int, Pieces]:
    """Embeddings before, between and behind tokens, and side by side."""
    text = list(range(40, 60))
    return {
        0: [text[:5], tiny.rows(7, 1), text[5:8], tiny.rows(20, 2), text[8:12]],
        1: [tiny.rows(2, 3), tiny.rows(3, 4), text[:1]],
        2: [text[:9], tiny.rows(9, 5)],
        3: [text[:1], tiny.rows(1, 6), tiny.rows(18, 7)],
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_between_tokens(
    family: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    tiny = Embedded(tiny_model(family))
    engine = served(tiny.folder, enable_prompt_embeds=True, max_batch_tokens=16)
    prompts = _pieces(tiny)
    tokens = engine.run(*(_mixed(request_of, key, pieces) for key, pieces in prompts.items()))
    expected = {k: tiny.answer(tiny.embedded(pieces), OUTPUT) for k, pieces in prompts.items()}
    assert tokens == expected
    assert len({tuple(own) for own in tokens.values()}) > 1, "the embeddings change nothing"


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_chunks_cut_embeddings_between_tokens(
    chunk: int, llama: Embedded, served: Make, request_of: Make
) -> None:
    engine = served(
        llama.folder, enable_prompt_embeds=True, max_batch_tokens=chunk, max_decoding_batch=1
    )
    for key, pieces in _pieces(llama).items():
        expected = llama.answer(llama.embedded(pieces), OUTPUT)
        assert engine.run(_mixed(request_of, key, pieces))[key] == expected
        assert not engine.runner._loaded.part(EmbedsPart).slots._rows, (
            "rows of a prompt that is computed"
        )


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunks_cut_embeddings(chunk: int, llama: Embedded, served: Make, request_of: Make) -> None:
    engine = served(
        llama.folder, enable_prompt_embeds=True, max_batch_tokens=chunk, max_decoding_batch=1
    )
    rows = llama.rows(21)
    assert engine.run(_request(request_of, 0, rows))[0] == llama.answer(rows, OUTPUT)
    slots = engine.runner._loaded.part(EmbedsPart).slots
    assert not slots._rows, "rows of a prompt that is computed"


@pytest.mark.parametrize("form", ["bfloat16", "float16"])
def test_rows_in_other_types(form: str, llama: Embedded, served: Make, request_of: Make) -> None:
    engine = served(llama.folder, enable_prompt_embeds=True)
    rows = llama.rows(11).to(getattr(torch, form))
    bits = rows.view(torch.uint16).numpy() if form == "bfloat16" else rows.numpy()
    made = request_of(0, row_ids(bits, form), OUTPUT, eos=(2,))
    made.parts = (EmbedsInput({ROWS: bits}, len(bits), form),)
    assert engine.run(made)[0] == llama.answer(rows.float(), OUTPUT)


def test_prefix_hits(llama: Embedded, served: Make, request_of: Make) -> None:
    """Pages of equal embeddings are shared, of others never."""
    engine = served(llama.folder, enable_prompt_embeds=True)
    first = llama.rows(40)
    longer = torch.cat([first[:32], llama.rows(16, 7)])
    other = first.clone()
    other[0, 0] += 1
    for key, rows in enumerate((first, first, longer, other)):
        tokens = engine.run(_request(request_of, key, rows))[key]
        assert tokens == llama.answer(rows, OUTPUT)
    assert engine.cached[1] >= 36 and engine.cached[2] == 32 and engine.cached[3] == 0


def test_prefix_hits_between_tokens(llama: Embedded, served: Make, request_of: Make) -> None:
    """Pages behind tokens are shared if their embeddings are equal, up to the first other one."""
    engine = served(llama.folder, enable_prompt_embeds=True)
    text, rows, other = list(range(40, 56)), llama.rows(32, 1), llama.rows(32, 2)
    prompts: list[Pieces] = [[text, rows, text], [text, rows, text], [text, other, text]]
    for key, pieces in enumerate(prompts):
        tokens = engine.run(_mixed(request_of, key, pieces))[key]
        assert tokens == llama.answer(llama.embedded(pieces), OUTPUT)
    assert engine.cached[1] >= 48 and engine.cached[2] == 16


def test_preempted_inside_embeddings(llama: Embedded, served: Make, request_of: Make) -> None:
    prompts = {key: llama.rows(20, key) for key in range(4)}
    engine = served(
        llama.folder,
        enable_prompt_embeds=True,
        num_pages=17,
        max_batch_tokens=8,
        max_model_len=60,
    )
    requests = (_request(request_of, key, rows, 20) for key, rows in prompts.items())
    tokens = engine.run(*requests, stagger=1)
    assert tokens == {key: llama.answer(rows, 20) for key, rows in prompts.items()}
    assert engine.engine.stats().preemptions > 0


def test_replaced_runners_keep_embeddings(llama: Embedded, served: Make, request_of: Make) -> None:
    """In the middle of a prompt, and in the middle of the answers."""
    engine = served(llama.folder, enable_prompt_embeds=True, max_batch_tokens=8)
    text = list(range(40, 50))
    prompts: dict[int, Pieces] = {1: [llama.rows(30, 1)], 2: [text, llama.rows(9, 2), text]}
    engine.lose_runners(2, 9)
    tokens = engine.run(*(_mixed(request_of, key, pieces) for key, pieces in prompts.items()))
    embedded = {key: llama.embedded(pieces) for key, pieces in prompts.items()}
    assert tokens == {key: llama.answer(rows, OUTPUT) for key, rows in embedded.items()}
    assert engine.lost == 2, "all was over before the second death"


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_change_no_token(
    method: str, llama: Embedded, served: Make, request_of: Make
) -> None:
    draft = {"model": str(llama.folder)} if method == "draft_model" else {}
    config = str({"method": method, "num_speculative_tokens": 3, **draft}).replace("'", '"')
    engine = served(
        llama.folder, enable_prompt_embeds=True, speculative_config=config, kv_cache_memory=2**21
    )
    prompts = {key: llama.rows(9 + key, key) for key in range(3)}
    prompts[3] = torch.cat([prompts[0]] * 3)
    tokens = engine.run(*(_request(request_of, key, rows, 20) for key, rows in prompts.items()))
    assert tokens == {key: llama.answer(rows, 20) for key, rows in prompts.items()}


def test_beside_adapters(llama: Embedded, served: Make, request_of: Make, tmp_path: Path) -> None:
    """The tokens of an adapter are peft's."""
    folder = make_adapter(llama.folder, tmp_path / "adapter")
    adapted: Any = PeftModel.from_pretrained(llama.copy(), folder)
    rows = llama.rows(20, 5)
    engine = served(llama.folder, enable_prompt_embeds=True, enable_lora=True, max_batch_tokens=16)
    other = _request(request_of, 1, rows)
    other.use(ref_of(folder))
    tokens = engine.run(_request(request_of, 0, rows), other)
    assert tokens == {0: llama.answer(rows, OUTPUT), 1: answer(adapted, rows, OUTPUT)}
    assert tokens[0] != tokens[1]


def test_numbers_that_overflow_change_no_other_request(
    llama: Embedded, served: Make, request_of: Make
) -> None:
    engine = served(llama.folder, enable_prompt_embeds=True)
    engine.runner._model.forward = engine._forward  # its record is for steps that succeed
    good, bad = llama.rows(12), torch.full((12, 32), 3e38)
    tokens = engine.run(_request(request_of, 0, bad), _request(request_of, 1, good))
    assert tokens[1] == llama.answer(good, OUTPUT) and engine.reasons[1] == "length"


def test_lost_rows_fail_one_request(llama: Embedded, served: Make, request_of: Make) -> None:
    engine = served(llama.folder, enable_prompt_embeds=True)
    engine.runner._model.forward = engine._forward
    good, lost = llama.rows(12), _request(request_of, 0, llama.rows(12, 3))
    lost.parts = (EmbedsInput({}, 12, "float32"),)
    tokens = engine.run(lost, _request(request_of, 1, good))
    assert engine.reasons[0] == "error" and tokens[1] == llama.answer(good, OUTPUT)


@pytest.mark.skipif(try_load() is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights(quantization: str, llama: Embedded, engine_args: Make) -> None:
    args = engine_args(llama.folder, enable_prompt_embeds=True, quantization=quantization)
    assert load(args).part_facts == (EmbedsFacts(size=32),)


def test_a_model_that_differs_is_refused(
    llama: Embedded, engine_args: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayfin.actors.runner.parts import embeds_model

    monkeypatch.setattr(embeds_model.EmbedsModel, "_given", lambda self, inputs: None)
    with pytest.raises(UnsupportedModel, match="logits differ") as caught:
        load(engine_args(llama.folder, enable_prompt_embeds=True))
    assert caught.value.param == "enable_prompt_embeds"


def test_models_that_take_none(engine_args: Make, tmp_path: Path) -> None:
    folder = VisionModel("llava", tmp_path).folder
    with pytest.raises(InvalidConfig, match="language_model_only"):
        load(engine_args(folder, enable_prompt_embeds=True))
    args = engine_args(folder, enable_prompt_embeds=True, language_model_only=True)
    assert load(args).part(EmbedsPart) is not None


def test_nothing_changes_without_the_flag(llama: Embedded, served: Make) -> None:
    engine = served(llama.folder)
    assert engine.config.parts == () and engine.runner._loaded.observers == []
    assert np.isfinite(llama.rows(1).numpy()).all()
