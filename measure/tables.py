"""Tables, numbers and words of reports, for a terminal and for Markdown."""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from measure.statistics import Interval

NOTHING = "–"  # where a table has no figure


def aligned(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table for a terminal: the first `left` columns are flush left, the others flush right."""
    return _table(header, list(rows), "plain", lambda column: column < left)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose source is aligned too, since a pager shows the source. Columns of numbers are flush right."""
    rows = list(rows)
    numeric = re.compile(rf"[\d−{NOTHING}]")
    return _table(header, rows, "pipe", lambda column: column == 0 or not any(numeric.match(row[column]) for row in rows))


def _table(header: Sequence[str], rows: list[Sequence[str]], style: str, is_left: Callable[[int], bool]) -> str:
    # Without rows tabulate knows no columns to align. Cells are formatted already; it would format a number anew.
    align = ["left" if is_left(column) else "right" for column in range(len(header))] if rows else None
    return tabulate(rows, list(header), tablefmt=style, colalign=align, disable_numparse=True)


def compact_markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table without padding, for README.md: no reader sees its source, and padding would double its size."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def columns(rows: Sequence[Mapping[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of rows that may lack some columns; those of the fullest row come first."""
    names = list(dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row))
    return names, [[row.get(name, NOTHING) for name in names] for row in rows]


def document(title: str, *parts: str) -> str:
    """Markdown of a title and of all parts that are not empty."""
    return "\n\n".join([f"# {title}", *filter(None, parts)]) + "\n"


def section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def listed(lines: Iterable[str]) -> str:
    return "\n".join(wrapped(f"- {line}") for line in lines)


def environment(facts: dict[str, Any]) -> str:
    """All known facts, a line each, in the order in which they were noted."""
    words = {True: "yes", False: "no"}
    known = [(name, words[of] if isinstance(of, bool) else str(of)) for name, of in flat(facts).items() if of is not None]
    return "```\n" + tabulate(known, tablefmt="plain", disable_numparse=True) + "\n```"


def wrapped(words: str) -> str:
    """Lines of at most 100 characters. The lines of a list item are indented."""
    indent = "  " if words.startswith("- ") else ""
    return textwrap.fill(words, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted name."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def number(ms: float) -> str:
    """Four or five digits: 131.70, 12.31, 1.234."""
    return f"{ms:.1f}" if ms >= 1000 else f"{ms:.2f}" if ms >= 10 else f"{ms:.3f}"


def interval_text(interval: Interval | None, digits: int = 3) -> str:
    """1.000 (0.999 to 1.001), never −0.000."""
    if interval is None:
        return NOTHING
    median, low, high = (f"{round(value, digits) + 0.0:.{digits}f}" for value in (interval.median, interval.low, interval.high))
    return f"{median} ({low} to {high})".replace("-", "−")


def label(overrides: dict[str, str], mode: str = "") -> str:
    """ "eager, model.dropout=0.1"; "this configuration" without a mode and overrides."""
    return ", ".join([*([mode] if mode else []), *(f"{k}={v}" for k, v in overrides.items())]) or "this configuration"


def capital(words: str) -> str:
    """With a capital letter, unless the first word is the name of a key."""
    return words if "=" in words.partition(",")[0] else words[:1].upper() + words[1:]


def machine(environment: dict[str, Any]) -> str:
    """GPU, versions and git revision in one line."""
    gpu = environment["gpu"]["name"] if environment["gpu"] else "CPU"
    known = ("torch", "triton", "flash-attn", "liger-kernel", "quack-kernels")
    versions = [f"{name} {environment['versions'][name]}" for name in known if environment["versions"].get(name)]
    git = environment["git"]
    return ", ".join([gpu, *versions, *([f"git {git['revision'][:8]}"] if git else [])])
