"""GBNF to Lark: what it accepts and rejects, and where it is wrong."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from byte_matcher import MARKS, accepts, compile_error, matcher_of, walk
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.guidance.grammar import make_grammar

JSON = r"""
# a JSON object, as llama.cpp writes it
root   ::= object   # the start
value  ::= object | array | string | number
  # a comment before a line that goes on
  | ("true" | "false" | "null") ws
object ::=
  "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""

CASES = [
    ("literals", r'root ::= "a\n\t\"\\\x41\u00e9\U0001F600\[" ', ['a\n\t"\\Aé😀['], ["a"]),
    ("no text", 'root ::= ""', [""], ["a"]),
    ("options", 'root ::= "a" | "ab" | ', ["a", "ab", ""], ["b", "abc"]),
    ("sets", r"root ::= [a-c\-\]^] [^a-c]", ["ad", "-é", "]\n", "^x"], ["aa", "dd"]),
    ("a set that ends with a hyphen", "root ::= [a-]", ["a", "-"], ["b"]),
    ("any character", "root ::= . .", ["ab", "é\n"], ["a", "abc"]),
    ("repetitions", 'root ::= "a"* "b"+ "c"?', ["b", "aabbc"], ["a", "bcc"]),
    ("bounds", 'root ::= "a"{2} "b"{1,} "c"{,2} "d"{1,2}', ["aabd", "aabbccdd"], ["abd", "aad"]),
    ("bounds of nothing", 'root ::= "a"{0} "b"{0,0} "c"', ["c"], ["ac"]),
    ("groups", 'root ::= ("a" | "b" "c")+', ["a", "abca"], ["b", ""]),
    ("groups over lines", 'root ::= (\n "a" # one\n |\n "b"\n) "c"', ["ac", "bc"], ["a"]),
    ("a rule over lines", 'root ::= "a"\n  "b"\n  x\nx ::= "c"', ["abc"], ["ab"]),
    ("names", 'root ::= Some_Rule-1\nSome_Rule-1 ::= "x"', ["x"], ["y"]),
    ("a comment with quotes", 'root ::= "a" # "b" ::= \nx ::= "#"', ["a"], ["#"]),
    ("recursion", 'root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", "()"]),
    ("left recursion", 'root ::= root "+" "1" | "1"', ["1", "1+1+1"], ["+", "1+"]),
    ("a set before its own", 'root ::= [a-z]+ "b" (root)?', ["ab", "abb", "xbyb"], ["b", "a"]),
    ("a set before a rule", 'root ::= [a-z]* x\nx ::= "z" root | "."', [".", "az.", "z."], ["z"]),
    ("bounds of a rule", 'root ::= x{2,3}\nx ::= "a" root? "b"', ["abab", "aababbab"], ["ab"]),
    ("JSON", JSON, ['{}', '{"a": [1, -2.5e1],"b":{"c":"\\u00e9"}}', '{"a":true}'],
     ['{"a"}', '[]', '{"a":tru}']),
]  # fmt: skip

BAD = [
    ("nothing", "::=", "invalid_schema"),
    ("no root", 'r ::= "a"', "invalid_schema"),
    ("an undefined rule", 'root ::= "a" | b', "invalid_schema"),
    ("a rule twice", 'root ::= "a"\nroot ::= "b"', "invalid_schema"),
    ("an open string", 'root ::= "a', "invalid_schema"),
    ("a string over lines", 'root ::= "a\nb"', "invalid_schema"),
    ("an open set", "root ::= [a", "invalid_schema"),
    ("an empty set", "root ::= []", "invalid_schema"),
    ("a set out of order", "root ::= [b-a]", "invalid_schema"),
    ("an open group", 'root ::= ("a"', "invalid_schema"),
    ("a group too many", 'root ::= "a")', "invalid_schema"),
    ("open bounds", 'root ::= "a"{2', "invalid_schema"),
    ("empty bounds", 'root ::= "a"{}', "invalid_schema"),
    ("crossed bounds", 'root ::= "a"{3,2}', "invalid_schema"),
    ("nothing to repeat", "root ::= *", "invalid_schema"),
    ("an unknown escape", r'root ::= "\q"', "invalid_schema"),
    ("half an escape", r'root ::= "\u00"', "invalid_schema"),
    ("a surrogate", r'root ::= "\ud800"', "invalid_schema"),
    ("a mark", 'root ::= "a" % "b"', "invalid_schema"),
    ("an unknown token", 'root ::= "a" <nope>', "invalid_schema"),
    ("look-ahead", 'root ::= (= "a") "a"', "unsupported_schema"),
    ("bounds of millions", 'root ::= "a"{1000000}', "schema_too_complex"),
    ("too many rules", "\n".join(f'r{i} ::= "a"' for i in range(2001)), "schema_too_complex"),
    ("a long string", f'root ::= "{"x" * 5000}"', "schema_too_complex"),
]


def lark(text: str) -> str:
    return make_grammar(StructuredOutputs(grammar=text), special_tokens=MARKS).text


@pytest.mark.parametrize(("text", "accepted", "rejected"), [c[1:] for c in CASES],
                         ids=[c[0] for c in CASES])  # fmt: skip
def test_grammars(text: str, accepted: list[str], rejected: list[str]) -> None:
    grammar = lark(text)
    for answer in accepted:
        assert accepts(grammar, answer), answer
    for answer in rejected:
        assert not accepts(grammar, answer), answer


@pytest.mark.parametrize(("text", "code"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_grammars(text: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        lark(text)
    assert (caught.value.code, caught.value.param) == (code, "structured_outputs.grammar")
    assert len(caught.value.message) <= 300


def test_errors_name_the_line() -> None:
    with pytest.raises(InvalidRequest, match="line 3"):
        lark('root ::= "a"\n# fine\nb ::= "c')


def test_tokens_are_written_by_id() -> None:
    grammar = lark('root ::= <tool> "a" root? <[258]>')
    assert accepts(grammar, "<tool>a</tool>") and accepts(grammar, "<tool>a<tool>a</tool></tool>")
    assert not accepts(grammar, "<tool>a", {}) and not accepts(grammar, "<tool>a</tool>", {})


def test_a_grammar_without_recursion_is_one_terminal() -> None:
    assert lark('root ::= [a-z]+ x\nx ::= "b" | "c"') == "start: /[a-z]+(?:b|c)/"


def test_chains_at_the_limit_compile() -> None:
    rules = "\n".join(f'r{i} ::= "a" | r{i + 1} root?' for i in range(900))
    assert not compile_error(lark(f'root ::= r0\n{rules}\nr900 ::= "x"'))
    deep = "(" * 60 + '"x" root?' + ")" * 60
    assert accepts(lark(f"root ::= {deep}"), "xxx")


@pytest.mark.parametrize("seed", range(15))
def test_what_is_drawn_is_json(seed: int) -> None:
    answer = walk(lark(JSON), seed)
    assert answer is None or isinstance(json.loads(answer), dict)


TERMINALS = {'"a"': "a", '"bc"': "bc", "[a-c]": "[a-c]", "[a-b]+": "[a-b]+", '"x"?': "x?",
             "[^b]{1,2}": "[^b]{1,2}", '"."': r"\."}  # fmt: skip
items = st.sampled_from(["root", "b", "c", *TERMINALS])
bodies = st.lists(st.lists(items, min_size=1, max_size=3), min_size=1, max_size=3)
rule_sets = st.fixed_dictionaries({"root": bodies, "b": bodies, "c": bodies})


def recognizes(rules: dict[str, list[list[str]]], text: str) -> bool:
    """Whether a text is of the grammar, by the plainest means: all ends of each rule, settled."""
    ends: dict[tuple[str, int], set[int]] = {}

    def after(item: str, at: int) -> set[int]:
        if item not in TERMINALS:
            return ends.get((item, at), set())
        pattern = re.compile(TERMINALS[item])
        return {end for end in range(at, len(text) + 1) if pattern.fullmatch(text, at, end)}

    changed = True
    while changed:
        changed = False
        for name, options in rules.items():
            for start in range(len(text) + 1):
                found: set[int] = set()
                for option in options:
                    places = {start}
                    for item in option:
                        places = {end for place in places for end in after(item, place)}
                    found |= places
                known = ends.setdefault((name, start), set())
                changed |= not found <= known
                known |= found
    return len(text) in ends["root", 0]


@given(rules=rule_sets, samples=st.lists(st.text("abcx.", max_size=5), max_size=6),
       seed=st.integers(0, 2**32))  # fmt: skip
def test_what_is_accepted_is_of_the_grammar(
    rules: dict[str, list[list[str]]], samples: list[str], seed: int
) -> None:
    rules = {name: [['"."'], *options] for name, options in rules.items()}
    text = "\n".join(
        f"{name} ::= " + " | ".join(map(" ".join, options)) for name, options in rules.items()
    )
    grammar = lark(text)
    for sample in samples:
        assert not accepts(grammar, sample) or recognizes(rules, sample), sample
    matcher = matcher_of(grammar)
    answer = bytearray()
    for _ in range(12):  # an ambiguous grammar may not come to its end at all
        if matcher.is_accepting():
            assert recognizes(rules, answer.decode()), answer
        mask = matcher.compute_bitmask()
        allowed = [t for t in b"abcx." if mask[t // 8] >> t % 8 & 1]
        if not allowed:
            break
        answer.append(allowed[seed % len(allowed)])
        seed //= 3
        assert matcher.consume_token(answer[-1])
