"""Markdown of a model as nodes: what it looks like, and what it can never do."""

import html
import re
from typing import Any

import pytest

ALLOWED = frozenset(
    "p h1 h2 h3 h4 h5 h6 hr br blockquote ul ol li input div table thead tbody tr th td "
    "strong em del code pre a span button".split()
)
SHOW = """async ([pieces]) => {
  const { Markdown } = await import("/ui/markdown.js");
  const root = document.createElement("main");
  const shown = new Markdown(root);
  let text = "";
  for (const piece of pieces) { text += piece; shown.show(text); }
  return root.innerHTML;
}"""
CASES = {
    "a **b** *c* ***d*** ~~e~~": "<p>a <strong>b</strong> <em>c</em> <strong><em>d</em></strong>"
    " <del>e</del></p>",
    "snake_case_name, 2 * 3 * 4, a_b": "<p>snake_case_name, 2 * 3 * 4, a_b</p>",
    "**open and `code **` ``a`b``": "<p>**open and <code>code **</code> <code>a`b</code></p>",
    r"\*plain\* \_": "<p>*plain* _</p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "## A *title* ##": "<h2>A <em>title</em></h2>",
    "- a\n- b\n  - c\n\nd": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>d</p>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "1. a\n\n   more\n2. b": '<ol start="1"><li>a<p>more</p></li><li>b</li></ol>',
    "- [x] a": '<ul><li class="task"><input type="checkbox" disabled="">a</li></ul>',
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "***": "<hr>",
    "a|b\n-|-:\n1|`x\\|y`": '<div class="scroll"><table><thead><tr><th>a</th>'
    '<th class="right">b</th></tr></thead><tbody><tr><td>1</td><td class="right">'
    "<code>x|y</code></td></tr></tbody></table></div>",
    "[a](https://b.c/d_(e)) <br>f": '<p><a href="https://b.c/d_(e)" target="_blank" '
    'rel="noopener noreferrer">a</a> <br>f</p>',
    "see https://b.c/d.": '<p>see <a href="https://b.c/d" target="_blank" '
    'rel="noopener noreferrer">https://b.c/d</a>.</p>',
    "[a](javascript:alert(1)) ![b](data:image/png,1)": "<p><span>a</span> <span>b</span></p>",
    "<img src=x onerror=alert(1)>&lt;": "<p>&lt;img src=x onerror=alert(1)&gt;&amp;lt;</p>",
}
HOSTILE = (
    "<script>alert(1)</script>",
    "[a](\x01javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1)) [b](vbscript:x) [c](//evil.example)",
    '[a](https://x"onmouseover="alert(1))',
    "![a](https://evil.example/steal?q=1)",
    '```html" onload="alert(1)\n<b>\n```',
    "| <svg onload=alert(1)> |\n|---|\n| <iframe src=x> |",
    "<a href='javascript:alert(1)'>x</a> &#x3C;script&#x3E;",
    "> - 1. > - > ### <b>deep</b>",
)
SLOW = ("*a" * 20000, "[" * 20000, "`a``" * 10000, "> " * 5000 + "a", "- " * 5000, "[a](" * 9000)


@pytest.fixture
def browser(url: str, page: Any) -> Any:
    page.goto(url)
    return page


def shown(browser: Any, *pieces: str) -> str:
    made: str = browser.evaluate(SHOW, [list(pieces)])
    return made


def test_markdown(browser: Any) -> None:
    for text, expected in CASES.items():
        assert shown(browser, text) == expected, text
        assert shown(browser, *text) == expected, text  # a character at a time


def test_code(browser: Any) -> None:
    made = shown(browser, "```python\ndef f():  # x\n    return 'a' + 1\n```\nafter")
    text = html.unescape(re.sub("<[^>]*>", "", re.sub("<div class=.code-head.*?</div>", "", made)))
    assert text == "def f():  # x\n    return 'a' + 1after"
    for kind, marked in {"word": "def", "comment": "# x", "string": "'a'", "number": "1"}.items():
        assert f'<span class="code-{kind}">{marked}</span>' in made
    assert "code-word" not in shown(browser, "```python\ndef f():")  # it still grows


def test_no_text_becomes_markup(browser: Any) -> None:
    for text in HOSTILE:
        made = shown(browser, text)
        tags = set(re.findall(r"<([a-z0-9]+)", made))
        assert tags <= ALLOWED, (text, made)
        attributes = set(re.findall(r"""\s([a-z]+)=(?=["'])""", re.sub(">[^<]*<", "><", made)))
        assert attributes <= {
            "class",
            "href",
            "target",
            "rel",
            "type",
            "disabled",
            "start",
            "tabindex",
        }
        assert all(
            link.startswith(("http:", "https:")) for link in re.findall('href="(.*?)"', made)
        )


def test_no_text_takes_long(browser: Any) -> None:
    """A search for every mark's other end would take minutes."""
    for text in SLOW:
        shown(browser, text)


def test_blocks_before_the_last_keep_their_nodes(browser: Any) -> None:
    kept = browser.evaluate(
        """async () => {
          const { Markdown } = await import("/ui/markdown.js");
          const root = document.createElement("main");
          const shown = new Markdown(root);
          shown.show("one\\n\\ntwo");
          const first = root.firstChild;
          shown.show("one\\n\\ntwo and more\\n\\n- three");
          return root.firstChild === first && root.children.length === 3;
        }"""
    )
    assert kept


def test_code_is_copied(browser: Any) -> None:
    browser.context.grant_permissions(["clipboard-read", "clipboard-write"])
    browser.evaluate(
        """async () => {
          const { codeBlock } = await import("/ui/code.js");
          document.body.replaceChildren(codeBlock("a < b", "c", true));
        }"""
    )
    browser.click(".copy")
    browser.wait_for_selector(".copy:has-text('Copied')")
    assert browser.evaluate("navigator.clipboard.readText()") == "a < b"
