"""The playground's scripts in headless Chromium: Markdown, colours of source text, principal components.

Skipped if Chromium is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browsers import driver, needs_browser, page  # noqa: F401 - fixtures
from servers import serving

pytestmark = [needs_browser, pytest.mark.builds]


@pytest.fixture(scope="module")
def server(bert: Path) -> Iterator[Any]:
    with serving([f"bert={bert}"]) as made:
        yield made


def _call(page: Any, module: str, function: str, *arguments: Any) -> Any:
    """Call a function of one of the page's scripts."""
    return page.execute_async_script("""
        const [module, name, given, done] = arguments;
        import(`/dashboard/${module}.js`).then((found) => done(found[name](...given)));""", module, function, arguments)


def _rendered(page: Any, source: str) -> str:
    found: str = page.execute_async_script("""
        const [source, done] = arguments;
        import('/dashboard/markdown.js').then(({ render }) => {
            const parent = document.createElement('div');
            render(parent, source);
            done(parent.innerHTML);
        });""", source)
    return found


# ---- Markdown --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "wanted"), [
    ("# A *b*", "<h3>A <em>b</em></h3>"),
    ("a **b _c_** `d*e*` ~~f~~", "<p>a <strong>b <em>c</em></strong> <code>d*e*</code> <s>f</s></p>"),
    ("a\nb\n\nc", "<p>a\nb</p><p>c</p>"),
    ("- a\n- b\n  - c\n  - d\n- e", "<ul><li>a</li><li>b<ul><li>c</li><li>d</li></ul></li><li>e</li></ul>"),
    ("3. a\n4. b\n\n   more", '<ol start="3"><li>a</li><li>b<p>more</p></li></ol>'),
    ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
    ("snake_case_name and 2 * 3 * 4 and \\*plain\\*", "<p>snake_case_name and 2 * 3 * 4 and *plain*</p>"),
    ("---", "<hr>"),
    ("[a](https://b.example/c) [d](http://e.example)",
     '<p><a href="https://b.example/c" target="_blank" rel="noopener noreferrer nofollow">a</a> '
     '<a href="http://e.example" target="_blank" rel="noopener noreferrer nofollow">d</a></p>'),
    # nothing of a model's output becomes an element or an address of its own choice
    ("<img src=x onerror=alert(1)><script>alert(1)</script>",
     "<p>&lt;img src=x onerror=alert(1)&gt;&lt;script&gt;alert(1)&lt;/script&gt;</p>"),
    ("[x](javascript:alert(1)) [y](data:text/html,z) ![z](https://a.example/b.png) [w](/api)",
     "<p>[x](javascript:alert(1)) [y](data:text/html,z) ![z](https://a.example/b.png) [w](/api)</p>"),
    ("**<b>x</b>** `<i>`", "<p><strong>&lt;b&gt;x&lt;/b&gt;</strong> <code>&lt;i&gt;</code></p>"),
])
def test_markdown(page: Any, source: str, wanted: str) -> None:
    assert _rendered(page, source) == wanted


def test_markdown_code_and_tables(page: Any) -> None:
    found = _rendered(page, "```diff <x>\nif a < b:\n    **c**\n```\nafter\n\n| a | *b* |\n|---|--:|\n| 1 | <b> |\n")
    assert "<code>if a &lt; b:\n    **c**</code>" in found and "<span>diff</span>" in found and "<p>after</p>" in found
    assert '<th>a</th><th class="right"><em>b</em></th>' in found
    assert '<td>1</td><td class="right">&lt;b&gt;</td>' in found
    assert "<code>not closed</code>" in _rendered(page, "~~~\nnot closed")


def test_headings_are_larger_than_text(page: Any) -> None:
    sizes = page.execute_async_script("""
        const done = arguments[0];
        import('/dashboard/markdown.js').then(({ render }) => {
            document.body.append(document.createElement('div'));
            document.body.lastChild.className = 'markdown';
            render(document.body.lastChild,
                'x\\n\\n' + [6, 5, 4, 3, 2, 1].map((n) => '#'.repeat(n) + ' x').join('\\n'));
            done([...document.body.lastChild.children].map((one) => parseFloat(getComputedStyle(one).fontSize)));
        });""")
    assert len(sizes) == 7 and sizes[0] < sizes[1] and sizes == sorted(sizes) and sizes[-1] > 1.4 * sizes[0]


#: Texts that take a careless page minutes, or more elements than a browser lays out in seconds.
BOMBS = [
    "> " * 100_000 + "x", "\n".join("  " * n + "- x" for n in range(1000)), "- " * 500_000, "> - " * 100_000,
    "- x\n" * 250_000, "---\n" * 250_000, "# a\n" * 250_000, "```\n" * 250_000, "a\n\n" * 300_000,
    "- a\n\n\n" * 100_000,
    "*" * 1_000_000, "**a " * 4900, "[" * 50_000, "[a](" * 4900, "`" * 50_001, "`a ``b " * 2800, "_a" * 9900,
    "|-" * 50_000 + "\n" + "|-" * 50_000, "|a|b|\n|-|-|\n" + "|1|2|\n" * 100_000, "|a|\n|-|\n" + "|" * 200_000,
    "~" * 50_000 + "\n" * 50_000, "x" * 1_000_000, " " * 1_000_000 + "x", "```python\n" + "x = 1\n" * 170_000,
]


@pytest.mark.parametrize("at", range(len(BOMBS)))
def test_hostile_markdown_is_bounded_in_elements_and_depth(page: Any, at: int) -> None:
    """The whole text is shown, laid out, and drawn again when it grows, before the time limit of a script."""
    source = BOMBS[at]
    elements, depth, length, again = page.execute_async_script("""
        const [source, done] = arguments, parent = document.createElement('div');
        parent.className = 'markdown';
        document.querySelector('main').append(parent);
        const depth = (one) => 1 + Math.max(0, ...[...one.children].map(depth));
        import('/dashboard/markdown.js').then(({ render }) => {
            render(parent, source);
            const kept = parent.firstElementChild;
            const found = [parent.querySelectorAll('*').length, depth(parent), parent.textContent.length];
            render(parent, source + '\\n\\nend');
            done([...found, parent.offsetHeight > 0
                && (kept === parent.firstElementChild || parent.children.length < 3)]);
        });""", source)
    assert elements < 12_000 and depth < 30 and again
    assert length > len(source) / 20 or source.strip("|-~`\n# ") in ("", "a")


# ---- colours of source text ------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("language", "source", "wanted"), [
    ("python",
     '@app.get("/x")\ndef f(a=0x1F):  # it\'s\n    """doc "x" """\n    return f"{a}" if a is None else g(1.5)',
     {"meta": ["@app.get"], "string": ['"/x"', '"""doc "x" """', 'f"{a}"'],
      "keyword": ["def", "return", "if", "is", "else"], "call": ["f", "g"], "number": ["0x1F", "1.5"],
      "comment": ["# it's"], "literal": ["None"]}),
    ("JSON", '{"a": [1, -2.5e3, true], "b\\"c" : "d: e"}',
     {"key": ['"a"', '"b\\"c"'], "number": ["1", "2.5e3"], "literal": ["true"], "string": ['"d: e"']}),
    ("ts", "const x = `a ${b} \\` c`; // it's\n/* y\n'z */ f('\\'') /* open",
     {"keyword": ["const"], "string": ["`a ${b} \\` c`", "'\\''"], "comment": ["// it's", "/* y\n'z */", "/* open"],
      "call": ["f"]}),
    ("bash", 'for f in "$HOME"/*; do ls --all -l ${f#x} $1; done # it\'s',
     {"keyword": ["for", "in", "do", "done"], "string": ['"$HOME"'], "meta": ["--all", "-l", "${f#x}", "$1"],
      "comment": ["# it's"]}),
    ("c++", "#include <a.h>\nint main(void) { char c = '\\n'; return 0x1fUL; } // end",
     {"meta": ["#include"], "keyword": ["int", "void", "char", "return"], "call": ["main"], "string": ["'\\n'"],
      "number": ["0x1fUL"], "comment": ["// end"]}),
    ("rust", "fn f<'a>(x: &'a str) { 'x'; }", {"keyword": ["fn"], "string": ["'x'"]}),
    ("constructor", "if (1) {}", {}),
    ("", "if (1) {}", {}),
])
def test_highlight(page: Any, language: str, source: str, wanted: dict[str, list[str]]) -> None:
    found = _call(page, "highlight", "highlight", source, language)
    assert "".join(part for _, part in found) == source
    kinds: dict[str, list[str]] = {}
    for kind, part in found:
        kinds.setdefault(kind, []).append(part)
    kinds.pop("", None)
    assert kinds == wanted


def test_highlighted_code_is_text(page: Any) -> None:
    found = _rendered(page, '```python\nx = "<img src=x onerror=alert(1)>" # </span><script>\n```')
    assert '<span class="hl-string">"&lt;img src=x onerror=alert(1)&gt;"</span>' in found
    assert '<span class="hl-comment"># &lt;/span&gt;&lt;script&gt;</span>' in found
    assert '<span class="hl-number">1</span>' in _rendered(page, "```c++ {1-3}\nx = 1\n```")


def test_hostile_source_is_coloured_once(page: Any) -> None:
    """No part of a text is lost or tried again and again: the sizes would take minutes with quadratic expressions."""
    parts = ['"', "'", "`", "\\", "'\\", '"""a\n', "/*", "#", "@a", "${", "--", "<", "1.", "[", " -", "\n[",
             "a ", " " * 99]
    for language in ("python", "json", "javascript", "shell", "c", "rust", "go", "sql", "yaml"):
        sources = [part * (50_000 // len(part)) for part in parts]
        found = page.execute_async_script("""
            const [sources, language, done] = arguments;
            import('/dashboard/highlight.js').then(({ highlight }) => done(sources.map((source) =>
                highlight(source, language).map(([, part]) => part).join('') === source)));""", sources, language)
        assert all(found), language


# ---- principal components --------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("count", "size"), [(40, 384), (300, 8), (3, 5)])
def test_principal_components_agree_with_singular_values(page: Any, count: int, size: int) -> None:
    rows = np.random.default_rng(count).normal(size=(count, size)) * np.linspace(3, 0.1, size) + 5
    found = _call(page, "components", "principal", rows.tolist())
    left, values, _ = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    points = np.array(found["points"])
    assert found["shares"] == pytest.approx((values ** 2 / (values ** 2).sum())[:2], rel=1e-6)
    for axis in range(2):
        wanted = left[:, axis] * values[axis]
        wanted *= np.sign(wanted[np.abs(wanted).argmax()])
        assert points[:, axis] == pytest.approx(wanted, abs=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize(("rows", "wanted"), [
    ([[1, 2]], [[0, 0]]), ([[1, 2], [1, 2], [1, 2]], [[0, 0]] * 3), ([[0, 0], [3, 4]], [[2.5, 0], [-2.5, 0]]),
    ([[1, 0], [-1, 0], [2, 0], [-2, 0]], [[1, 0], [-1, 0], [2, 0], [-2, 0]]),
    # a start along the row of greatest length would stay on the smaller component
    ([[3, 0], [-3, 0], [0, 2.9], [0, 2.9], [0, -2.9], [0, -2.9]],
     [[0, 3], [0, -3], [2.9, 0], [2.9, 0], [-2.9, 0], [-2.9, 0]]),
])
def test_principal_components_of_degenerate_vectors(page: Any, rows: list[Any], wanted: list[Any]) -> None:
    found = np.array(_call(page, "components", "principal", rows)["points"])
    assert np.abs(found) == pytest.approx(np.abs(np.array(wanted)), abs=1e-5)
