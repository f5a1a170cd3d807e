"""Guided requests through an engine, token for token against a plain loop over the logits."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from rayfin.actors.config import resolve
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.grammar_limits import limits, ll_tokenizer_of
from rayfin.actors.guidance import NO_END, CallGrammar, Guidance, Thinking
from rayfin.actors.messages import Sampling
from rayfin.actors.model_files.fast_tokenizer import load_fast
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import ModelRunner, RunnerPlugins
from rayfin.actors.runner.parts.grammars.compile_threads import IdleCompiler
from rayfin.actors.runner.parts.grammars.masker import GrammarsPart, GuidanceProcessor
from rayfin.actors.runner.sampling.processor import Rows
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.timing import GRAMMAR_BARRED_SECONDS

Make = Callable[..., Any]
KINDS = ["byte_level", "sentencepiece"]
END, THINK, CLOSE, CALL, CALLED = 2, 3, 4, 5, 6
OUTPUT = 24
PROMPTS = [[15, 9, 30, 15, 9, 30], [17, 17, 60, 20, 44, 31, 8, 17, 90], [11, 12]]

ROWS = "start: ROW+\nROW: /[a-d]{1,3}=[0-9]{1,4};/"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
OBJECT = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
OF_A_CALL = f"start: JSON <[{CALLED}]>\nJSON: /\\{{[a-z]{{0,3}}\\}}/"
GUIDANCES = {
    "rows": Guidance(grammar=ROWS, ends=(END,)),
    "rows, late ends": Guidance(grammar=ROWS, ends=(END,), ends_from=NO_END),
    "object": Guidance(grammar=OBJECT, ends=(END,)),
    "calls": Guidance(
        calls=CallGrammar((CALL, *range(20, 60)), OF_A_CALL, max_calls=2), ends=(END,)
    ),
    "thought": Guidance(
        grammar=ROWS, thinking=Thinking("</think>", (CLOSE,), True, budget=7), ends=(END,)
    ),
    "forbidden": Guidance(forbidden=tuple(range(50, 90)), ends=(END,)),
}


def mask_of(guidance: Guidance, output: list[int], vocabulary: Any, position: int) -> set[int]:
    """What may be sampled after ``output``, worked out from the start with a matcher of its own."""
    everything = set(range(116))
    rest, ends = list(output), set(guidance.ends)
    if guidance.thinking is not None:
        if CLOSE not in rest:
            if len(rest) >= (guidance.thinking.budget or 0):
                return {CLOSE}
            return everything - ends
        rest = rest[rest.index(CLOSE) + 1 :]
    grammar, calls = guidance.grammar, 0
    if guidance.calls is not None:
        grammar = ""
        text: list[int] = []
        for token in rest:
            if grammar:
                text.append(token)
                if token == CALLED:
                    grammar, text = "", []
            elif token in guidance.calls.triggers and calls < (guidance.calls.max_calls or 0):
                grammar, calls = guidance.calls.grammar, calls + 1
        rest = text
    if not grammar:
        used_up = guidance.calls is not None and calls == guidance.calls.max_calls
        triggers = guidance.calls.triggers if used_up and guidance.calls else ()
        return (
            everything - set(guidance.forbidden) - set(triggers)
            if (guidance.forbidden or used_up)
            else set(range(128))
        )
    matcher = LLMatcher(vocabulary, grammar, limits=limits())
    assert matcher.consume_tokens(rest), matcher.get_error()
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    allowed = set(np.flatnonzero(bits).tolist())
    if position < guidance.ends_from and allowed - ends:
        allowed -= ends
    return allowed


def oracle(tiny: Any, prompt: list[int], guidance: Guidance | None, vocabulary: Any) -> list[int]:
    history = list(prompt)
    while len(history) < len(prompt) + OUTPUT and history[-1:] != [END]:
        logits = tiny.logits(history)[-1].clone()
        if guidance is not None:
            output = history[len(prompt) :]
            allowed = mask_of(guidance, output, vocabulary, len(history))
            never = [token for token in range(len(logits)) if token not in allowed]
            logits[never] = -torch.inf
        history.append(int(logits.argmax()))
    return history[len(prompt) :]


def serve(
    args: Any,
    requests: Iterable[Any],
    num_pages: int | None = None,
    plugins: RunnerPlugins | None = None,
    drafts: int = 0,
) -> tuple[dict[int, list[int]], dict[int, Any], Engine]:
    """All requests to their end: tokens by key, ends by key."""
    runner = ModelRunner(args, plugins=plugins)
    config = resolve(args, *runner.profile())
    config = replace(config, num_pages=num_pages or config.num_pages, num_speculative_tokens=drafts)
    engine = Engine(config, InlineExecutor(runner, config))
    engine._multi_step.observe(0.001, 1)
    tokens: dict[int, list[int]] = {}
    ends: dict[int, Any] = {}
    for request in requests:
        tokens[request.key] = []
        engine.add(request)
    while engine.has_work:
        for deltas in engine.step().values():
            for key, token in zip(deltas.keys.tolist(), deltas.tokens.tolist(), strict=True):
                tokens[key].append(token)
            ends |= {ended.key: ended for ended in deltas.ended}
    engine.check_integrity()
    return tokens, ends, engine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_steps", "num_pages"), [(1, 60), (4, 60), (1, 16)])
def test_tokens_are_those_of_a_plain_loop(
    num_steps: int,
    num_pages: int,
    kind: str,
    tiny_model: Make,
    engine_args: Make,
    request_of: Make,
    tiny_tokenizer: Make,
) -> None:
    """All kinds of guidance beside rows without any; in one call, and after preemptions."""
    tiny, folder = tiny_model("llama"), str(tiny_tokenizer(kind))
    vocabulary = ll_tokenizer_of(load_fast(folder), 128)
    args = engine_args(tiny.folder, tokenizer=folder, max_lease=num_steps)
    cases = [(None, PROMPTS[0]), (None, PROMPTS[1])]
    cases += [(guidance, prompt) for guidance in GUIDANCES.values() for prompt in PROMPTS]
    requests = [
        request_of(key, prompt, OUTPUT, eos=(END,), guidance=guidance)
        for key, (guidance, prompt) in enumerate(cases)
    ]
    tokens, ends, engine = serve(args, requests, num_pages)
    for key, (guidance, prompt) in enumerate(cases):
        assert tokens[key] == oracle(tiny, prompt, guidance, vocabulary), (key, ends[key])
    assert not any(ended.error for ended in ends.values())
    assert bool(engine.stats().preemptions) == (num_pages == 16)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_follows_the_grammar(
    kind: str,
    temperature: float,
    tiny_model: Make,
    engine_args: Make,
    request_of: Make,
    tiny_tokenizer: Make,
) -> None:
    """Drawn, with log probabilities and with other rules on the same rows."""
    folder = str(tiny_tokenizer(kind))
    vocabulary = ll_tokenizer_of(load_fast(folder), 128)
    args = engine_args(tiny_model("llama").folder, tokenizer=folder, max_batch_tokens=64)
    requests = [
        request_of(
            key,
            PROMPTS[key % 3],
            60,
            eos=(END,),
            sampling=Sampling(
                temperature=temperature,
                seed=key,
                repetition_penalty=1.2 if key > 3 else 1.0,
                logprobs=2 if key % 3 else None,
                banned=(END,),
                banned_until=NO_END if key > 3 else 0,  # the grammar's ends all the same
            ),
            guidance=GUIDANCES["rows" if key % 2 else "object"],
        )
        for key in range(8)
    ]
    tokens, ends, _ = serve(args, requests)
    finished = 0
    for key, own in tokens.items():
        assert ends[key].error is None, ends[key].error
        text = vocabulary.decode_bytes([token for token in own if token != END]).decode()
        if ends[key].finish_reason == "stop":
            finished += 1
            pattern = r"([a-d]{1,3}=\d{1,4};)+" if key % 2 else r'\{"n":-?\d+,"ok":(true|false)\}'
            assert re.fullmatch(pattern, text), text
    assert finished or temperature == 0


def test_forks(tiny_model: Make, engine_args: Make, request_of: Make, tiny_tokenizer: Make) -> None:
    """Choices of one prompt share the grammar, not the matcher."""
    args = engine_args(
        tiny_model("llama").folder, tokenizer=str(tiny_tokenizer("byte_level")), page_size=4
    )
    requests = [
        request_of(
            key,
            PROMPTS[1],
            OUTPUT,
            eos=(END,),
            sampling=Sampling(temperature=1.4, seed=key),
            guidance=GUIDANCES["rows"],
        )
        for key in range(4)
    ]
    alone = {request.key: serve(args, [request])[0][request.key] for request in requests}
    together = [requests[0], *(replace(own, parent_key=0) for own in requests[1:])]
    tokens, _, _ = serve(args, together)
    assert tokens == alone and len({tuple(own) for own in tokens.values()}) > 1


class Echo:
    """Proposes what a row has said before: the drafts are right where a grammar forces them."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def add(self, slot: int, request: Any) -> None:
        self.tokens[slot] = request.history.tolist()

    def remove(self, slot: int) -> None:
        del self.tokens[slot]

    def accept(self, slots: Any, tokens: Any, counts: Any) -> None:
        for slot, row, count in zip(slots.tolist(), tokens, counts.tolist(), strict=True):
            self.tokens[slot] += row[:count].tolist()

    def propose(self, slots: Any, room: Any) -> Any:
        from rayfin.actors.runner.speculation.interface import Drafts

        guesses = np.zeros((len(slots), int(room.max())), np.int32)
        for row, slot in enumerate(slots.tolist()):
            guesses[row] = self.tokens[slot][-5]
        return Drafts(guesses, np.minimum(room, guesses.shape[1]))


def test_drafts(
    tiny_model: Make, engine_args: Make, request_of: Make, tiny_tokenizer: Make
) -> None:
    tiny, folder = tiny_model("llama"), str(tiny_tokenizer("byte_level"))
    args = engine_args(tiny.folder, tokenizer=folder, max_decoding_batch=16)
    requests = [
        request_of(key, PROMPTS[1], OUTPUT, eos=(END,), guidance=guidance)
        for key, guidance in enumerate([None, *GUIDANCES.values()])
    ]
    plain, _, _ = serve(args, requests)
    drafted, ends, _ = serve(args, requests, plugins=RunnerPlugins(proposer=Echo), drafts=3)
    assert drafted == plain and not any(ended.error for ended in ends.values())


def test_a_failing_matcher_fails_its_row_alone(
    tiny_model: Make, engine_args: Make, request_of: Make, tiny_tokenizer: Make
) -> None:
    tiny, folder = tiny_model("llama"), str(tiny_tokenizer("byte_level"))
    args = engine_args(tiny.folder, tokenizer=folder)
    guidances = [
        Guidance(grammar="start: missing", ends=(END,)),
        Guidance(grammar='start: "ab" "c"', ends=()),  # complete, and no end to say so
        GUIDANCES["rows"],
        None,
    ]
    requests = [
        request_of(key, PROMPTS[0], OUTPUT, eos=(END,), guidance=guidance)
        for key, guidance in enumerate(guidances)
    ]
    vocabulary = ll_tokenizer_of(load_fast(folder), 128)
    tokens, ends, _ = serve(args, requests)
    assert [ends[key].finish_reason for key in (0, 1)] == ["error", "error"]
    assert [ends[key].error.code for key in (0, 1)] == ["grammar_failed"] * 2
    assert "unknown name" in str(ends[0].error) and tokens[0] == []
    assert vocabulary.decode_bytes(tokens[1]) == b"abc"
    for key in (2, 3):
        assert tokens[key] == oracle(tiny, PROMPTS[0], guidances[key], vocabulary)


def test_without_a_tokenizer_guided_rows_fail_alone(
    tiny_model: Make, engine_args: Make, request_of: Make
) -> None:
    tiny = tiny_model("llama")  # a folder without one
    requests = [
        request_of(key, PROMPTS[0], 4, guidance=guidance)
        for key, guidance in enumerate([GUIDANCES["rows"], None])
    ]
    tokens, ends, _ = serve(engine_args(tiny.folder), requests)
    assert "Cannot load a tokenizer" in str(ends[0].error) and tokens[0] == []
    assert tokens[1] == tiny.greedy(PROMPTS[0], 4)


def test_slow_masks_fail_their_row(tiny_book: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "rayfin.actors.runner.parts.grammars.masker"
    monkeypatch.setattr(f"{module}.MASK_SECONDS", 0.0)
    monkeypatch.setattr(f"{module}.MASK_OVERTIME_SECONDS", 0.0)
    monkeypatch.setattr(f"{module}.SLOWER_THAN_FORWARD", 0.0)
    for limited in (True, False):
        processor = GuidanceProcessor(torch.device("cpu"), tiny_book(), limited=limited)
        processor.add(3, introduce(3, GUIDANCES["rows"]))
        masks = processor.masks(Rows([0], [3], [5]), 128)
        assert bool(masks.errors) == limited and bool(masks.allowed.words.any()) != limited
        if limited:
            assert masks.errors[0].code == "grammar_too_slow"
            assert processor.masks(Rows([0], [3], [5]), 128).errors == masks.errors


def test_a_grammar_that_held_up_a_step_is_barred(
    tiny_book: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For new requests, and for a while; one that was preempted goes on, and so do others."""
    module = "rayfin.actors.runner.parts.grammars.masker"
    now = 100.0
    monkeypatch.setattr("rayfin.actors.runner.parts.grammars.book.time.monotonic", lambda: now)
    book = tiny_book()
    processor = GuidanceProcessor(torch.device("cpu"), book)
    with monkeypatch.context() as patch:
        for name in ("MASK_SECONDS", "MASK_OVERTIME_SECONDS", "SLOWER_THAN_FORWARD"):
            patch.setattr(f"{module}.{name}", 0.0)
        processor.add(0, introduce(0, GUIDANCES["rows"]))
        assert processor.masks(Rows([0], [0], [5]), 128).errors

    def error_of(slot: int, guidance: Guidance, *output: int) -> Any:
        processor.add(slot, introduce(slot, guidance, *output))
        return processor.masks(Rows([0], [slot], [5 + len(output)]), 128).errors.get(0)

    assert error_of(1, GUIDANCES["rows"]).code == "grammar_too_slow"
    assert error_of(2, GUIDANCES["object"]) is None
    assert error_of(3, GUIDANCES["rows"], *book.vocabulary.tokens.tokenize_str("a")) is None
    now += GRAMMAR_BARRED_SECONDS + 1  # the refusal has not made it longer
    assert error_of(4, GUIDANCES["rows"]) is None


def introduce(slot: int, guidance: Guidance, *output: int) -> Any:
    from rayfin.actors.messages import NewRequest

    history = np.array([9, 9, 9, 9, 9, *output], np.int32)
    parts = (guidance,)
    return NewRequest(slot, Sampling(), 99, history=history, prompt_len=5, parts=parts)


@pytest.mark.parametrize("threads", [1, 3])
def test_masks_of_many_grammars(threads: int, tiny_book: Make) -> None:
    """In threads or without: each row has its own, and what was done is counted once."""
    processor = GuidanceProcessor(torch.device("cpu"), tiny_book(), threads=threads)
    guidances = [GUIDANCES["rows"], GUIDANCES["object"], GUIDANCES["rows"], GUIDANCES["thought"]]
    for slot, guidance in enumerate(guidances):
        assert processor.add(slot, introduce(slot, guidance))
    processor.accept(2, [104 - 1])
    rows = Rows([5, 1, 2, 7], [0, 1, 2, 3], [5, 5, 6, 5])
    masks = processor.masks(rows, 128)
    assert masks.allowed.rows.tolist() == [5, 1, 2, 7]
    alone = [processor.masks(Rows([0], [slot], [6]), 128).allowed.words[0] for slot in range(4)]
    assert torch.equal(masks.allowed.words, torch.stack(alone))
    usage = processor.take_usage()
    assert usage is not None and usage.hits == 2 and usage.misses == 2 and usage.loaded == 2
    assert len(usage.compile_seconds) == 2 and len(usage.mask_seconds) == 5
    assert processor.take_usage() is None


def test_preparing(
    tiny_model: Make,
    engine_args: Make,
    tiny_tokenizer: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(IdleCompiler, "compile", None)  # the engine's loop waits
    args = engine_args(tiny_model("llama").folder, tokenizer=str(tiny_tokenizer("byte_level")))
    runner = ModelRunner(args)
    executor = InlineExecutor(runner, resolve(args, *runner.profile()))
    good = executor.prepare([*Guidance(ROWS).needs, *Guidance(OBJECT).needs])
    assert good.done() and good.error() is None
    part = runner._loaded.part(GrammarsPart)
    assert part is not None and ROWS in part.book and OBJECT in part.book
    bad = executor.prepare(Guidance("start: missing").needs)
    error = bad.error()
    assert isinstance(error, InvalidRequest) and error.code == "grammar_failed"
    assert bad.done() and "unknown name" in str(error)


def test_no_guidance_costs_nothing(
    tiny_model: Make, engine_args: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No vocabulary is loaded, and no masks are asked for."""
    tiny = tiny_model("llama")
    monkeypatch.setattr(GuidanceProcessor, "masks", None)
    tokens, _, _ = serve(engine_args(tiny.folder), [request_of(0, PROMPTS[0], 6)])
    assert tokens[0] == tiny.greedy(PROMPTS[0], 6)
