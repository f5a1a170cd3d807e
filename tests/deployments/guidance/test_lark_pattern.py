"""Grammars of custom tools as patterns: what they match, by Python's own regular expressions."""

import re

import pytest

from patches import APPLY_PATCH
from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.guidance.lark_pattern import pattern_of_lark, pattern_of_regex

ARITHMETIC = r"""
?start: sum
sum: product | sum ("+" | "-") product   // repeats itself at its left
product: atom
       | atom "*" product
atom: NUMBER -> number
    | "(" sum ")"
    | "sin"i "(" sum ")"
%import common.NUMBER
%import common.WS_INLINE
%ignore WS_INLINE
"""
SELECT = r"""
start: "SELECT" SP columns SP "FROM" SP NAME [SP "WHERE" SP NAME "=" VALUE] (";" NL)?
columns: "*" | NAME ("," SP? NAME)~0..2
VALUE: /[0-9]+/ | /'([^'\\]|\\.)*'/
NAME.2: LETTER (LETTER | "_" | "0".."9")*
SP: " "
%import common (LETTER, NEWLINE)
NL: NEWLINE
"""
MATCHED = [
    (ARITHMETIC, ["1", "1+2-3+4+5+6+7", "2*(3 + 4)*5", " 1 + SIN( 2 ) ", "(1)"]),
    (SELECT, ["SELECT * FROM t", "SELECT a, b,c_1 FROM t WHERE x='it\\'s';\n"]),
    (r'start: "a\n\"\\\x41é" /./s', ['a\n"\\Aé\n']),
    ("start: /[a-c]+/i{2,3}", ["AbC"]),
    ("start: /[^a-c]./is", ["d\n", "DA"]),
    (r"start: /./ /[^\n\r\u2028\u2029]/", ["\ra", "\u2028b"]),
    ("start: a\na: b\nb: /x/ |\n", ["x", ""]),
]
REFUSED = [
    (ARITHMETIC, ["", "1+", "(1", "1 2", "a"]),
    (SELECT, ["SELECT *FROM t", "SELECT a,b,c,d FROM t", "SELECT a FROM 1", "select a FROM t"]),
    (r'start: "a\n\"\\\x41é" /./s', ['a\n"\\Aé']),
    ("start: /[a-c]+/i{2,3}", ["d", ""]),
    ("start: /[^a-c]./is", ["ax", "Cx"]),
    (r"start: /./ /[^\n\r\u2028\u2029]/", ["a\r", "a\u2029", "\na"]),
    ("start: a\na: b\nb: /x/ |\n", ["xx"]),
]


def python_pattern(pattern: str) -> str:
    r"""Rust's dialect as Python's: \x{41} is \u0041 there, and the sets are the same."""
    return re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", pattern)


@pytest.mark.parametrize(("cases", "right"), [(MATCHED, True), (REFUSED, False)])
def test_what_a_grammar_matches(cases: list[tuple[str, list[str]]], right: bool) -> None:
    for grammar, texts in cases:
        pattern = re.compile(python_pattern(pattern_of_lark(grammar, "x")))
        for text in texts:
            assert bool(pattern.fullmatch(text)) is right, (grammar, text)


def test_the_grammar_of_patches() -> None:
    pattern = re.compile(python_pattern(pattern_of_lark(APPLY_PATCH, "x")))
    patch = (
        "*** Begin Patch\n*** Add File: a\n+\n+x\n*** Update File: b\n"
        "*** Move to: c\n@@ f\n-x\n y\n"
        "*** End of File\n*** Delete File: d\n*** End Patch"
    )
    assert pattern.fullmatch(patch) and pattern.fullmatch(patch + "\n")
    for wrong in (patch.replace("+x", "x"), patch.replace(": a", ": "), patch[:-1], patch + "\n\n"):
        assert not pattern.fullmatch(wrong), wrong


def test_a_pattern_matches_the_whole_text() -> None:
    assert pattern_of_regex(r"^\d+.$", "x") == r"^(?:[0-9]+[^\n])$"


@pytest.mark.parametrize(
    ("grammar", "code"),
    [
        ('start: "a', "invalid_schema"),
        ("begin: /a/", "invalid_schema"),
        ("start: a", "invalid_schema"),
        ('start: start "a"', "invalid_schema"),
        ('start: ("a"', "invalid_schema"),
        ('start: "a"\nstart: "b"', "invalid_schema"),
        ('start: "a" ~ 3..2', "invalid_schema"),
        ('start: "ab".."c"', "invalid_schema"),
        ('start: "ab"..', "invalid_schema"),
        ('start: "a"' + "?" * 9999, "invalid_schema"),
        ("start: /[/", "invalid_schema"),
        ("start: /a(?=b)/", "unsupported_schema"),
        ("start: A\n%import python.A", "unsupported_schema"),
        ("%declare A\nstart: A", "invalid_schema"),
        ('start: %json {"type": "object"}', "invalid_schema"),
        ("start: /(a{1,900}){1,900}/", "schema_too_complex"),
        ("start: " + "(" * 99 + '"a"' + ")" * 99, "schema_too_complex"),
        ("start: " + "a " * 9 + "\na: " + "/[a-z]{9}/ " * 99, "schema_too_complex"),
        ("start: " + '"a"' * 9999, "schema_too_complex"),
        ("start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(999)), "schema_too_complex"),
        ("start: a\na: " + "b " * 9 + "\nb: " + "a " * 9 + "\n", "schema_too_complex"),
    ],
)
def test_grammars_that_are_refused(grammar: str, code: str) -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\]\.format\.definition ") as caught:
        pattern_of_lark(grammar, "tools[0].format.definition")
    assert caught.value.code == code and caught.value.param == "tools[0].format.definition"
