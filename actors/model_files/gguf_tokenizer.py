"""The tokenizer in a GGUF file's header, where it is one of byte pairs.

Such a file names the way in which text is split before byte pairs are merged, and holds no
pattern. The patterns here are facts of llama.cpp's source: text is split as it does there, also
where that is simpler than the original tokenizer (letters of other scripts have no case).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

NAME = "tokenizer.ggml.pre"
UNKNOWN = "unknown_split"
"""The key in tokenizer_config.json with the name of a split that is not known."""

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are found in a text before it is split."""

ENDS = frozenset(("<|eot_id|>", "<|im_end|>", "<end_of_turn>"))
"""Tokens that end an answer in any file, as in llama.cpp."""

MARKS = r"""[!-/:-@\[-`{-~]"""
CASED = r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u10D0-\u10FF]]"
KANA = r"[\u4E00-\u9FA5\u3040-\u30FF]+"
CJK = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF&&[^\s]]+"
HAN = (
    r"\u4E00-\u9FFF\u3400-\u4DBF\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}"
    r"\uF900-\uFAFF\x{2F800}-\x{2FA1F}"
)
SOUTH_EAST = (
    r"\u4E00-\u9FFF\u3400-\u4DBF\u8C48-\uFAFF\u3040-\u30FF\uFF65-\uFF9F\u2F00-\u2FDF"
    r"\u0E40-\u0EFF\u1780-\u17FF\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF\uAC00-\uD7AF\u1100-\u11FF"
)
STOPS = r" ?[^(\s|.,!?\u2026\u3002\uFF0C\u3001\u0964\u06D4\u060C)]+"

SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LINE_BLANKS = r"\s*[\r\n]|\s+(?!\S)|\s+"
HALVES = "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# What is before a number stays beside its first digits.
THREES = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
LINES = r"[^\n]+|\n+"


def _words(
    number: str,
    letters: str = r"\p{L}+",
    *,
    short: str = f"{SHORT}|",
    others: str = r"[^\s\p{L}\p{N}]",
    tail: str = r"[\r\n]*",
    blanks: str = BLANKS,
) -> str:
    """Returns a pattern of Llama 3's kind."""
    return rf"{short}[^\r\n\p{{L}}\p{{N}}]?{letters}|{number}| ?{others}+{tail}|{blanks}"


def _cased(letter: str, number: str, end: str = f"{SHORT}?") -> str:
    """Returns a pattern of GPT-4o's kind: a word ends before a capital letter."""
    upper, lower = f"[{letter}&&[^a-z]]", f"[{letter}&&[^A-Z]]"
    words = f"(?:{upper}*{lower}+|{upper}+{lower}*){end}"
    return _words(number, words, short="", tail=r"[\r\n/]*")


def _marked(marks: str) -> str:
    """Returns a pattern of DeepSeek V3's kind."""
    words = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    return rf"{MARKS}[A-Za-z]+|{words}| ?[\p{{P}}\p{{S}}]+{marks}"


ANY_CASE = rf"[\p{{L}}\p{{M}}]+{SHORT}?"


class Split(NamedTuple):
    """Splits of a text: by each pattern in turn, into its matches and what is between."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is not merged
    begins: bool = False  # texts begin with a token, where the file does not say


def _split(*patterns: str, whole_words: bool = False, begins: bool = False) -> Split:
    return Split(patterns, whole_words, begins)


FAMILIES: dict[str, Split] = {
    "default": _split(r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
    "jina-v1-en jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4": _split(
        GPT2
    ),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": _split(r"\p{N}", GPT2),
    "falcon": _split(r"[\p{P}$+<=>^~|`]+", GPT2, r"[0-9][0-9][0-9]"),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _split(
        _words(r"\p{N}{1,3}"), whole_words=True, begins=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": _split(_words(r"\p{N}{1,3}")),
    "jais-2": _split(_words(r"\p{N}{1,3}", blanks=rf"\s*[\r\n]+|{HALVES}|\s{{1,2}}(?!\S)|\s")),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": _split(
        _words(r"\p{N}")
    ),
    "qwen35": _split(_words(r"\p{N}", r"[\p{L}\p{M}]+", others=r"[^\s\p{L}\p{M}\p{N}]")),
    "ufakzeka": _split(_words(r"\p{N}", short="")),
    "seed-coder": _split(_words(r"\p{N}", tail="")),
    "bailingmoe bailingmoe2 llada-moe": _split(_words(r"\p{N}", blanks=LINE_BLANKS)),
    "exaone-moe": _split(
        _words(r"\p{N}", r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", tail=r"[\r\n/]?", blanks=LINE_BLANKS)
    ),
    "laguna": _split(LINES, _words(r"\p{N}")),
    "minicpm5": _split(r"\p{N}{1,3}", _words(r"\p{N}+"), whole_words=True),
    "tekken": _split(_cased(r"\p{L}", r"\p{N}", ""), whole_words=True, begins=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _split(_cased(r"\p{L}", r"\p{N}{1,3}")),
    "granite-embed-multi-97m": _split(_cased(r"\p{L}\p{M}", r"\p{N}{1,3}"), whole_words=True),
    "tiny_aya cohere2moe": _split(
        THREES, _words(r"\p{N}{1,3}", ANY_CASE, short="", tail=r"[\r\n/]*")
    ),
    "youtu": _split(
        r"[\uAC00-\uD7A3\u3131-\u318E]+|[\uFF01\u2026\u201C\u201D\u2018\u2019\u2014\uFF1A\uFF1B"
        rf"\uFF0C\u3001-\u303F\uFE30-\uFE4F]+|[\u3105-\u312F]+|{KANA}",
        _words(r"\p{N}", ANY_CASE, short="", tail=r"[\r\n/]*"),
        whole_words=True,
    ),
    "kimi-k2": _split(
        rf"[{HAN}]+|" + _words(r"\p{N}{1,3}", rf"[\p{{L}}&&[^{HAN}]]+{SHORT}?", short="")
    ),
    "deepseek-llm": _split(
        *(
            r"[\r\n]",
            rf"\s?{CASED}+",
            r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3001\u3002]+",
        ),
        *(r"\s+$", CJK, r"\p{N}+"),
    ),
    "deepseek-coder": _split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _split(
        r"\p{N}{1,3}", KANA, _marked(rf"[\r\n]*|{BLANKS}")
    ),
    "spark2_5": _split(r"\p{N}{1,3}", KANA, _marked(r"|[\r\n]|\s+(?!\S)|\s+"), r"\p{N}"),
    "afmoe": _split(
        THREES,
        rf"[{SOUTH_EAST}]+",
        _marked(rf"[\r\n]*|{BLANKS}"),
    ),
    "superbpe": _split(r"\p{N}+", r"(?=(?:[0-9]{3})+(?![0-9]))"),
    "poro-chat bloom gpt3-finnish": _split(STOPS),
    "viking": _split(STOPS, r"\p{N}"),
    "chameleon": _split(
        *(r"<sentinel:[0-9]+>", r"(?:IMGIMG)[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}"),
        *(rf"\p{{P}}|{MARKS}", GPT2),
        begins=True,
    ),
}
"""By the names in ``tokenizer.ggml.pre`` that mean the same."""

SPLITS = {name: split for names, split in FAMILIES.items() for name in names.split()}


def make_tokenizer(header: Mapping[str, Any]) -> Any:
    """Makes transformers' tokenizer of a header whose ``tokenizer.ggml.model`` is gpt2.

    Args:
        header: the file's fields; tokens, types and merges as lists.
    """
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = header["tokenizer.ggml.tokens"]
    name = header.get(NAME) or "default"
    split = SPLITS.get(name, SPLITS["gpt-2"])
    merges = [_pair(merge) for merge in header.get("tokenizer.ggml.merges", ())]
    inner = Tokenizer(
        models.BPE(
            {token: place for place, token in enumerate(tokens)},
            merges,
            ignore_merges=split.whole_words,
        )
    )
    isolated = [pre_tokenizers.Split(Regex(one), "isolated") for one in split.patterns]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*isolated, bytes_])
    inner.decoder = decoders.ByteLevel()
    types = header.get("tokenizer.ggml.token_type") or ()
    added = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (CONTROL, USER_DEFINED)
    ]
    inner.add_tokens(added)
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{name}_token": tokens[place]
        for name, key in keys.items()
        if (place := header.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    begins = header.get("tokenizer.ggml.add_bos_token", split.begins and "bos_token" in special)
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=inner,
        **({"bos_token": None, "eos_token": None} | special),
        add_bos_token=begins,
        add_eos_token=header.get("tokenizer.ggml.add_eos_token", False),
        chat_template=chat_templates(header),
        clean_up_tokenization_spaces=False,
        **({} if name in SPLITS else {UNKNOWN: name}),
    )


def _pair(merge: str) -> tuple[str, str]:
    """Splits a merge at its blank; a token may begin with one."""
    place = merge.index(" ", 1)
    return merge[:place], merge[place + 1 :]


def chat_templates(header: Mapping[str, Any]) -> Any:
    """Returns the file's template, or several by their names, or None."""
    key = "tokenizer.chat_template"
    names = [one for one in header if one.startswith(f"{key}.")]
    if not names:
        return header.get(key)
    default = {"default": header[key]} if key in header else {}
    return default | {one.removeprefix(f"{key}."): header[one] for one in names}


def end_tokens(header: Mapping[str, Any]) -> list[int]:
    """Returns the tokens that end an answer, without repetitions."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    said = [int(header[key]) for key in keys if header.get(key) is not None]
    tokens, types = (
        header.get(f"tokenizer.ggml.{name}") or () for name in ("tokens", "token_type")
    )
    known = [
        place
        for place, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == CONTROL and token in ENDS
    ]
    return list(dict.fromkeys([*said, *known]))
