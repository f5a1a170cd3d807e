"""Whisper's transcripts are those of transformers' forward and logits processors, on every way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from audio_models import tone
from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.parts import front_tokens
from rayfin.actors.runner.loading import load
from rayfin.actors.runner.parts.vision.load import VisionPart
from rayfin.actors.runner.parts.whisper.decoder import WhisperDecoder
from rayfin.actors.runner.parts.whisper.probe import Probe
from whisper_models import EOS, FIRST_TIME, FRAMES, PAGE_SIZE, POSITIONS, WhisperOracle

Make = Callable[..., Any]
OUTPUT = 24
NGRAMS = '{"method": "ngram", "num_speculative_tokens": 3}'


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> WhisperOracle:
    return WhisperOracle(tmp_path_factory.mktemp("whisper"))


def _prompts(own: WhisperOracle) -> list[tuple[list[int], Any]]:
    """Prompts of all kinds, and their clips."""
    ask = own.prompts.ask
    return [
        (ask("en", "transcribe", "", times=False), tone(1, 1.9)),
        (ask("en", "transcribe", "", times=True), tone(1, 1.9)),
        (ask("German", "translate", "a hint", times=True), tone(2, 0.7)),
        (ask("zh", "transcribe", "words " * 20, times=False), tone(3)),
    ]


def _request(request_of: Make, key: int, prompt: tuple[Any, Any], output: int = OUTPUT) -> Any:
    ids, clips = prompt
    made = request_of(key, ids, output, eos=(EOS,))
    made.parts = clips
    return made


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_tokens_are_transformers_own(
    attention: str, page_size: int, oracle: WhisperOracle, served: Make, request_of: Make
) -> None:
    """Four transcripts in one batch, by chunks of 40 tokens."""
    prompts = _prompts(oracle)
    settings = {"attention": attention, "page_size": page_size}
    engine = served(oracle.folder, max_batch_tokens=40, **settings)
    made = [oracle.prompt(*own, page_size) for own in prompts]
    tokens = engine.run(*(_request(request_of, key, one) for key, one in enumerate(made)))
    expected = {key: oracle.greedy(*own, OUTPUT) for key, own in enumerate(prompts)}
    assert tokens == expected
    assert len({tuple(own) for own in tokens.values()}) == len(prompts), "the clips change nothing"
    assert any(token >= FIRST_TIME for token in tokens[1])


def test_a_language_is_heard(oracle: WhisperOracle, served: Make, request_of: Make) -> None:
    """One token; the transcript that is asked for then finds the clip's pages."""
    engine = served(oracle.folder, page_size=PAGE_SIZE, mm_encoder_cache_gb=0.0)
    clips = [tone(seed, 1.5) for seed in range(5)]
    for key, clip in enumerate(clips):
        detect = oracle.prompt(oracle.prompts.detect(), clip)
        (token,) = engine.run(_request(request_of, key, detect, 1))[key]
        assert token == oracle.language(clip)
    encoder = engine.runner._loaded.part(VisionPart).encoder
    encoded = encoder.num_encoded
    code = oracle.prompts.language(token)
    ask = oracle.prompts.ask(code, "transcribe", "", times=False)
    tokens = engine.run(_request(request_of, 9, oracle.prompt(ask, clip)))[9]
    assert tokens == oracle.greedy(ask, clip, OUTPUT)
    assert encoder.num_encoded == encoded and engine.cached[9] >= FRAMES


def test_a_prompt_of_the_start_alone(oracle: WhisperOracle, served: Make, request_of: Make) -> None:
    """As vLLM's users write it: language, task and no times come first, then the text."""
    engine = served(oracle.folder, page_size=PAGE_SIZE)
    clip = tone(4, 1.5)
    request = _request(request_of, 0, oracle.prompt(oracle.prompts.detect(), clip))
    language, task, no_times, *text = engine.run(request)[0]
    own = oracle.prompts.tokens
    assert language == oracle.language(clip)
    assert (task, no_times) == (own.tasks["transcribe"], own.no_times)
    ask = oracle.prompts.ask(oracle.prompts.language(language), "transcribe", "", times=False)
    assert text == oracle.greedy(ask, clip, OUTPUT - 3)


def test_english_only(tmp_path: Path, served: Make, request_of: Make) -> None:
    own = WhisperOracle(tmp_path, seed=1, english=True)
    prompts = [(own.prompts.ask(None, "transcribe", "", times=times), tone(1)) for times in (0, 1)]
    assert [len(ids) for ids, _ in prompts] == [3, 2]
    engine = served(own.folder, page_size=PAGE_SIZE)
    made = (own.prompt(*prompt) for prompt in prompts)
    tokens = engine.run(*(_request(request_of, key, one) for key, one in enumerate(made)))
    assert tokens == {key: own.greedy(*prompt, OUTPUT) for key, prompt in enumerate(prompts)}
    with pytest.raises(ValueError, match="does not translate"):
        own.prompts.ask(None, "translate", "", times=False)
    with pytest.raises(ValueError, match="English only"):
        own.prompts.ask("de", "transcribe", "", times=False)


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_chunks_cut_clips(
    chunk: int, oracle: WhisperOracle, served: Make, request_of: Make
) -> None:
    settings = {"max_decoding_batch": 1, "max_batch_tokens": chunk, "page_size": PAGE_SIZE}
    engine = served(oracle.folder, **settings)
    ids, clip = _prompts(oracle)[2]
    tokens = engine.run(_request(request_of, 0, oracle.prompt(ids, clip)))[0]
    assert tokens == oracle.greedy(ids, clip, OUTPUT)
    assert engine.runner._loaded.part(VisionPart).encoder.num_encoded == 1


def test_preempted(oracle: WhisperOracle, served: Make, request_of: Make) -> None:
    """In the middle of clips and of transcripts, whose times go on where they were."""
    prompts = [(oracle.prompts.ask("en", "transcribe", "", times=True), tone(k)) for k in range(4)]
    pages = 2 * (FRAMES // PAGE_SIZE + 2)
    engine = served(oracle.folder, num_pages=pages, page_size=PAGE_SIZE, max_batch_tokens=30)
    made = (oracle.prompt(*prompt) for prompt in prompts)
    tokens = engine.run(
        *(_request(request_of, key, one) for key, one in enumerate(made)), stagger=1
    )
    assert tokens == {key: oracle.greedy(*prompt, OUTPUT) for key, prompt in enumerate(prompts)}
    assert engine.engine.stats().preemptions > 0


def test_replaced_runners(oracle: WhisperOracle, served: Make, request_of: Make) -> None:
    """In the middle of a clip, and in the middle of transcripts."""
    engine = served(oracle.folder, page_size=PAGE_SIZE, max_batch_tokens=60)
    prompts = _prompts(oracle)[:3]
    engine.lose_runners(2, 16)
    made = (oracle.prompt(*prompt) for prompt in prompts)
    tokens = engine.run(*(_request(request_of, key, one) for key, one in enumerate(made)))
    assert tokens == {key: oracle.greedy(*own, OUTPUT) for key, own in enumerate(prompts)}
    assert engine.lost == 2, "all was over before the second death"


def test_drafts_and_leases(oracle: WhisperOracle, served: Make, request_of: Make) -> None:
    """Several tokens a step, of n-grams and of leases, keep to the rules."""
    for settings in ({"speculative_config": NGRAMS}, {"max_lease": 8}):
        engine = served(oracle.folder, page_size=PAGE_SIZE, max_batch_tokens=80, **settings)
        prompts = _prompts(oracle)
        made = (oracle.prompt(*prompt) for prompt in prompts)
        tokens = engine.run(*(_request(request_of, key, one) for key, one in enumerate(made)))
        assert tokens == {key: oracle.greedy(*own, OUTPUT) for key, own in enumerate(prompts)}


def test_choices_of_one_prompt(oracle: WhisperOracle, served: Make, request_of: Make) -> None:
    engine = served(oracle.folder, page_size=PAGE_SIZE, max_batch_tokens=40)
    ids, clip = _prompts(oracle)[1]
    prompt = oracle.prompt(ids, clip)
    first, second = (_request(request_of, key, prompt) for key in range(2))
    second.parent_key = first.key
    tokens = engine.run(first, second)
    assert tokens[0] == tokens[1] == oracle.greedy(ids, clip, OUTPUT)
    assert engine.runner._loaded.part(VisionPart).encoder.num_encoded == 1


def test_in_16_bits(oracle: WhisperOracle, served: Make, request_of: Make) -> None:
    """Tokens depend on none beside them."""
    engine = served(oracle.folder, dtype="bfloat16", page_size=PAGE_SIZE, max_batch_tokens=64)
    made = [oracle.prompt(*prompt) for prompt in _prompts(oracle)]
    together = engine.run(*(_request(request_of, key, one) for key, one in enumerate(made)))
    for key, one in enumerate(made):
        alone = served(oracle.folder, dtype="bfloat16", page_size=PAGE_SIZE)
        assert alone.run(_request(request_of, key, one))[key] == together[key]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_differs_is_refused(
    dtype: str, oracle: WhisperOracle, engine_args: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WhisperDecoder, "_keep_clips", lambda self, inputs: None)
    with pytest.raises(UnsupportedModel, match="over pages its logits differ"):
        load(engine_args(oracle.folder, dtype=dtype))


def test_a_model_that_rounds_is_served(
    oracle: WhisperOracle, engine_args: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits transformers' own logits may be a tenth off those in 32."""
    monkeypatch.setattr(Probe, "difference", lambda self, decoder, page_size: 0.15)
    load(engine_args(oracle.folder, dtype="bfloat16"))
    with pytest.raises(UnsupportedModel, match="differ"):
        load(engine_args(oracle.folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_lora": True}, "LoRA"),
        ({"language_model_only": True}, "no language model"),
        ({"quantization": "int4"}, "for models of text"),
        ({"enable_prompt_embeds": True}, "for models of text"),
    ],
)
def test_settings_that_do_not_go_with_it(
    settings: dict[str, Any], message: str, oracle: WhisperOracle, engine_args: Make
) -> None:
    with pytest.raises((InvalidConfig, UnsupportedModel), match=message):
        load(engine_args(oracle.folder, **settings))


def test_max_model_len_counts_transcripts(oracle: WhisperOracle, served: Make) -> None:
    """As in vLLM, whose users give 448."""
    clip = -(-FRAMES // PAGE_SIZE) * PAGE_SIZE
    for given, most in ((None, POSITIONS), (POSITIONS, POSITIONS), (20, 20)):
        engine = served(oracle.folder, page_size=PAGE_SIZE, max_model_len=given)
        tokens = front_tokens(engine.config.parts)
        assert (engine.config.max_model_len, tokens) == (clip + most, clip)
    with pytest.raises(InvalidConfig, match=rf"over the model's own limit \({POSITIONS}\)"):
        served(oracle.folder, page_size=PAGE_SIZE, max_model_len=POSITIONS + 1)


def test_scarce_memory(oracle: WhisperOracle, served: Make) -> None:
    """No model is served whose pages hold a clip and nothing more; the message counts as a user."""
    clip = -(-FRAMES // PAGE_SIZE)
    size = served(oracle.folder, page_size=PAGE_SIZE).config.page_bytes
    for pages in (5, clip):
        with pytest.raises(InvalidConfig, match=f"kv_cache_memory {(clip + 8) * size}"):
            served(oracle.folder, page_size=PAGE_SIZE, kv_cache_memory=pages * size)
    scarce = {"page_size": PAGE_SIZE, "kv_cache_memory": (clip + 1) * size}
    assert served(oracle.folder, **scarce).config.max_model_len == (clip + 1) * PAGE_SIZE
    with pytest.raises(InvalidConfig, match="What fits: max_model_len 8;"):
        served(oracle.folder, max_model_len=20, **scarce)


def test_random_weights(oracle: WhisperOracle, served: Make, request_of: Make) -> None:
    """transformers' own defaults for the rules name tokens of another vocabulary."""
    engine = served(oracle.folder, page_size=PAGE_SIZE, load_format="dummy")
    prompt = oracle.prompt(*_prompts(oracle)[1])
    tokens = engine.run(_request(request_of, 0, prompt, 5))[0]
    assert not engine.errors and tokens[0] >= FIRST_TIME


@pytest.mark.gpu
def test_tokens_of_a_gpu(oracle: WhisperOracle, served: Make, request_of: Make) -> None:
    engine = served(oracle.folder, device="cuda", page_size=16, max_batch_tokens=40)
    made = [oracle.prompt(*own, 16) for own in _prompts(oracle)]
    tokens = engine.run(*(_request(request_of, key, one) for key, one in enumerate(made)))
    assert tokens == {key: oracle.greedy(*own, OUTPUT) for key, own in enumerate(_prompts(oracle))}
