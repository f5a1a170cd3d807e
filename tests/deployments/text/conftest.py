"""Small tokenizers of the three kinds that decoders of today use."""

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from rayfin.deployments.text.tokenizer import Tokenizer

TEXTS = [
    "hello world, this is a test of the tokenizer",
    "the quick brown fox jumps over the lazy dog",
    "héllo wörld — 你好 مرحبا 👩‍👩‍👧",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def finished(backend: Backend, eos: str, template: str | None = TEMPLATE) -> Tokenizer:
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    inner.chat_template = template
    return Tokenizer(inner)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS,
        BpeTrainer(
            vocab_size=340,
            special_tokens=SPECIAL,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    added = [AddedToken(text, special=False) for text in ("<think>", "</think>", "<|turn|>")]
    backend.add_tokens(added)
    return finished(backend, "<|im_end|>")


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """As Llama 2: words start with a visible space, unknown characters fall apart into bytes."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", "h", "e", "l", "o", "▁h", "▁he", "w", "▁w", "你", "."]
    vocab = {text: i for i, text in enumerate(["<unk>", "<s>", "</s>", *bytes_, *words])}
    merges = [("▁", "h"), ("▁h", "e"), ("▁", "w")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return finished(backend, "</s>", None)


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """As a sentencepiece unigram: the decoder strips the space of the first token only."""
    pieces = ["<unk>", "</s>", "▁", "▁hello", "▁world", "h", "e", "l", "o", "w", "r", "d", "."]
    backend = Backend(models.Unigram([(text, -float(i)) for i, text in enumerate(pieces)], 0))
    backend.add_special_tokens(["</s>"])
    backend.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return finished(backend, "</s>", None)
