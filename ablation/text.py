"""Words, numbers and tables for reports: readable in a pager, in Markdown and without."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any


def section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose source is aligned, since a pager shows the source."""
    lines = [list(header), *map(list, rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]
    # Words to the left, numbers to the right.
    words = [i == 0 or all(not numeric(line[i]) for line in lines[1:]) for i in range(len(header))]

    def shown(line: Sequence[str]) -> str:
        cells = (cell.ljust(w) if left else cell.rjust(w) for cell, w, left in zip(line, widths, words, strict=True))
        return f"| {' | '.join(cells)} |"

    rule = ["-" * w if left else "-" * (w - 1) + ":" for w, left in zip(widths, words, strict=True)]
    return "\n".join([shown(lines[0]), f"| {' | '.join(rule)} |", *map(shown, lines[1:])])


def aligned(header: Sequence[str] | None, rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns padded to their widest entry, the first `left` to the left and all others to the right; titles take no room."""
    lines = [*([list(header)] if header else []), *map(list, rows)]
    if not lines:
        return ""
    # A line with nothing but its first entry is a title, and may reach over the other columns.
    full = [line for line in lines if any(line[1:])] or lines
    widths = [max(len(line[i]) for line in full) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            entry.ljust(w) if i < left else entry.rjust(w) for i, (entry, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def environment(facts: dict[str, Any]) -> str:
    """All that is known, a line each, in the order in which it was noted."""
    known = [(name, value) for name, value in flat(facts).items() if value is not None]
    return "```\n" + aligned(None, [[name, fact(value)] for name, value in known], left=2) + "\n```"


def wrapped(words: str) -> str:
    """Lines that a pager shows whole; those of a list's item are indented."""
    indent = "  " if words.startswith("- ") else ""
    return textwrap.fill(words, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def firsts(pairs: Iterable[tuple[str, Any]]) -> Iterable[tuple[bool, str, Any]]:
    return ((i == 0, *pair) for i, pair in enumerate(pairs))


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted name."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def numeric(entry: str) -> bool:
    return entry[:1].isdigit() or entry[:1] in ("−", "–")


def number(ms: float) -> str:
    """Four digits or so: 131.70, 12.310, 1.234."""
    return f"{ms:.1f}" if ms >= 1000 else f"{ms:.2f}" if ms >= 10 else f"{ms:.3f}"


def loss(nats: float) -> str:
    return f"{nats:.5f}"


def signed(value: float, digits: int = 5) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def capital(words: str) -> str:
    """With a capital letter, unless the first word is the name of a key."""
    return words if "=" in words.partition(",")[0] else words[:1].upper() + words[1:]
