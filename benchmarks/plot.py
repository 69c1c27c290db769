"""A plot of a record as SVG: for each measure a panel of bars, one per engine, with the spread of the turns.

The text is made without a library, so the same record always gives the same bytes, and a test can compare them.
"""

from html import escape
from typing import Any

from .engines import split
from .report import LESS, number

COLUMNS, WIDTH, LABELS, VALUES, ROW, HEAD, GAP = 3, 470, 200, 60, 18, 34, 14
OURS, THEIRS, INK, FAINT = "#2563eb", "#9ca3af", "#111827", "#6b7280"


def svg(record: dict[str, Any]) -> str:
    """Return the plot of a record. Pale bars have no undisturbed turn."""
    panels = [(topic, name, row) for topic, rows in record["summary"].items() for name, row in rows.items() if row]
    lines: list[str] = []
    top = 44
    for start in range(0, len(panels), COLUMNS):
        beside = panels[start:start + COLUMNS]
        for column, (topic, name, row) in enumerate(beside):
            lines += _panel(topic, name, row, GAP + column * (WIDTH + GAP), top)
        top += HEAD + ROW * max(len(row) for _, _, row in beside) + GAP
    machine = record["machine"]
    width = GAP + COLUMNS * (WIDTH + GAP)
    title = f"{machine['date']}, {machine['cpu']}, {machine['threads']} threads"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{top}" fill="#ffffff"/>',
        _text(width / 2, 24, title, INK, "middle", 'font-size="15"'), *lines, "</svg>"]) + "\n"


def ratios(title: str, groups: list[tuple[str, str, list[tuple[str, float]]]]) -> str:
    """Return a plot of ratios: for each group its label, the measured value, and a bar per peer from 0; 1 is marked.

    The width is that of a page's text, so that the letters keep their size.
    """
    width, names, row, head = 760, 218, 20, 24
    scale = (width - names - VALUES) / max(ratio for _, _, bars in groups for _, ratio in bars)
    lines, top = [_text(GAP, 26, title, INK, "start", 'font-size="15" font-weight="bold"')], 44
    one = names + scale
    for label, measured, bars in groups:
        lines += [_text(GAP, top + 16, label, INK, "start"),
                  _text(width - GAP, top + 16, measured, FAINT, "end")]
        for at, (peer, ratio) in enumerate(bars):
            y = top + head + at * row
            lines += [_text(names - 6, y + 12, peer, FAINT, "end", 'font-size="11"'),
                      f'<rect x="{names}" y="{y}" width="{ratio * scale:.1f}" height="{row - 4}" fill="{OURS}"/>',
                      _text(names + ratio * scale + 5, y + 12, f"{ratio:.2f}x", INK, "start")]
        lines.append(f'<path d="M{one:.1f} {top + head - 2}V{top + head + len(bars) * row - 2}" stroke="{THEIRS}" '
                     'stroke-width="2"/>')
        top += head + row * len(bars) + 8
    lines.append(_text(one, top + 12, "1x: equally fast", FAINT, "middle", 'font-size="11"'))
    top += 24
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{top}" rx="8" fill="#ffffff"/>', *lines, "</svg>"]) + "\n"


def _panel(topic: str, name: str, row: dict[str, dict[str, Any]], left: float, top: float) -> list[str]:
    less = ", less is better" if name.endswith(LESS) else ""
    lines = [_text(left, top + 18, f"{topic}: {name}{less}", INK, "start", 'font-weight="bold"')]
    scale = (WIDTH - LABELS - VALUES) / max(cell["max"] for cell in row.values())
    begin = left + LABELS
    for at, (engine, cell) in enumerate(row.items()):
        y = top + HEAD + at * ROW
        middle, end = y + ROW / 2 - 1, begin + cell["max"] * scale
        colour = OURS if split(engine)[0] == "mpool" else THEIRS
        lines += [
            _text(begin - 6, middle + 4, engine, INK, "end"),
            f'<rect x="{begin:.1f}" y="{y:.1f}" width="{cell["median"] * scale:.1f}" height="{ROW - 4}" '
            f'fill="{colour}" fill-opacity="{1 if cell["n"] else 0.4}"/>',
            f'<path d="M{begin + cell["min"] * scale:.1f} {middle:.1f}H{end:.1f}" stroke="{INK}"/>',
            _text(end + 5, middle + 4, f"{number(cell['median'])} (n={cell['n']})", FAINT, "start", 'font-size="10"')]
    return lines


def _text(x: float, y: float, text: str, colour: str, anchor: str, more: str = "") -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}"{" " + more if more else ""}>'
            f"{escape(text)}</text>")
