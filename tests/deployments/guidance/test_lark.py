"""Grammars of Lark that users write."""

import pytest

from byte_matcher import MARKS, accepts, compile_error, vocabulary
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.guidance.compile_check import judge
from rayfin.deployments.guidance.grammar import Grammar, make_grammar

GOOD = [
    ("strings", 'start: "a" "b"i\n', ["ab", "aB"], ["a"]),
    ("rules", "start: a+ // many\na: /[0-9]{2}/ | \"x\" # two\n", ["12x", "x"], ["1"]),
    ("options over lines", 'start: "a"\n  | "b"\n\n  | "c"', ["a", "c"], ["ab"]),
    ("terminals", 'start: WORD ("," WORD)*\nWORD: LETTER+\nLETTER: "a".."c"', ["ab,c"], ["d", ","]),
    ("attributes", 'start: a "."\na[lazy, capture="x"]: /.*/ "!"', ["xy!."], ["xy!"]),
    ("suffix", 'start: a\na[suffix="!"]: /[a-z]*/', ["xy!"], ["xy"]),
    ("imports", "start: INT A\n%import common.INT\n%import common (WORD, DIGIT)\n"
     "%import common.LETTER -> A", ["12x"], ["x"]),
    ("ignore", 'start: "a" "b"\n%ignore / +/', ["a  b", "ab"], ["b"]),
    ("maybe and groups", 'start: ["a"] ("b" | ("c" "d")~2..3)', ["ab", "cdcd"], ["cd"]),
    ("aliases", 'start: a -> one\n  | "b" -> two\na: "a"', ["a", "b"], ["c"]),
    ("negation", "start: A\nA: /[a-z]+/ & ~/.*b.*/", ["ac"], ["abc"]),
    ("recursion", 'start: "(" start ")" | "x"', ["((x))"], ["(x"]),
    ("nested", 'start: "a" %lark {\nstart: b\nb: "b"\n}', ["ab"], ["a"]),
    ("tokens", "start: <tool> /[0-9]+/ </tool>", ["<tool>12</tool>"], ["<tool>x</tool>"]),
    ("tokens by id", "start: <[257]> <[0-96,98]>", ["<tool>b"], ["<tool>a"]),
    ("a schema", 'start: "x" %json {"type": "integer"} "y"', ["x1y"], ["xay"]),
    ("options of the library", '%llguidance {"no_forcing": true}\nstart: "a"', ["a"], ["b"]),
    ("substrings", 'start: A\nA: %regex {"substring_chars": "abc"}', ["bc", ""], ["ac"]),
]  # fmt: skip

BAD = [
    ("an open schema", 'start: %json {"type": ', "invalid_schema", ""),
    ("a schema with not", 'start: %json {"items": {"not": {}}}', "unsupported_schema",
     ".items.not"),
    ("a deep schema", "start: %json " + '{"items":' * 5000, "schema_too_complex", ""),
]  # fmt: skip

REFUSED = [
    ("an undefined rule", 'start: "a" b', "invalid"),
    ("an undefined terminal", "start: A\nA: B", "invalid"),
    ("no start", 'a: "a"', "invalid"),
    ("an unknown token", 'start: "a" <nope>', "invalid"),
    ("another grammar", "start: @other", "invalid"),
    ("an open string", 'start: "a', "invalid"),
    ("a schema of nothing", 'start: %json {"enum": []}', "unsatisfiable"),
    ("bounds of a regex", "start: /(a{1000}){1000}/", "too_complex"),
    ("bounds of a group", 'start: (("a"~300)~300)', "too_complex"),
]
"""What compiling shows."""


def made(text: str) -> Grammar:
    return make_grammar(StructuredOutputs(grammar=text), special_tokens=MARKS)


@pytest.mark.parametrize(("text", "accepted", "rejected"), [g[1:] for g in GOOD],
                         ids=[g[0] for g in GOOD])  # fmt: skip
def test_grammars(text: str, accepted: list[str], rejected: list[str]) -> None:
    grammar = made(text).text
    for answer in accepted:
        assert accepts(grammar, answer), answer
    for answer in rejected:
        assert not accepts(grammar, answer), answer


@pytest.mark.parametrize(("text", "code", "path"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_grammars(text: str, code: str, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(text)
    assert (caught.value.code, caught.value.param) == (code, f"structured_outputs.grammar{path}")


@pytest.mark.parametrize(("text", "kind"), [b[1:] for b in REFUSED], ids=[b[0] for b in REFUSED])
def test_refused_grammars(text: str, kind: str) -> None:
    verdict = judge(vocabulary(), made(text).text)
    assert verdict.kind == kind and verdict.reason


def test_schemas_are_found_among_other_parts() -> None:
    text = (
        'start: /%json \\{/ "%json {" A // %json {\nA: %regex {"substring_chars": "%json"} # %json'
    )
    assert made(text).text == text
    nested = made('start: %lark {\nstart: "/" %json {"type": "null", "x": 1} /b/\n}')
    assert nested.unenforced == ("structured_outputs.grammar.x",)
    assert accepts(nested.text, "/nullb")


def test_a_schema_within_is_rewritten() -> None:
    grammar = made(
        'start: "x" %json {"type": "object", "properties": {"a": {"type": "integer"}}, "x": 1}'
    )
    assert grammar.unenforced == ("structured_outputs.grammar.x",)
    assert accepts(grammar.text, 'x{"a": 1}') and not accepts(grammar.text, 'x{"\\u0061": ""}')


def test_a_schema_within_cannot_set_the_librarys_options() -> None:
    grammar = made('start: %json {"x-guidance": {"lenient": true}, "type": "array"}')
    assert "lenient" not in grammar.text


def test_chains_at_the_limit_compile() -> None:
    rules = "\n".join(f'r{i}: "a" | r{i + 1} r{i + 1}?' for i in range(900))
    assert not compile_error(made(f'start: r0\n{rules}\nr900: "x"').text)
