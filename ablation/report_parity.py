"""The section on parity of an ablation's report."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from ablation.records import Parity
from ablation.rounding import Quantity
from measure.tables import capital, interval_text, label, markdown, wrapped

SHIFT = ", shift"  # how parity ends the names of what it looks at for a sign that all seeds share

MOST_QUANTITIES = 10

PARITY_RULE = (
    "All arms have the same initial weights, batches and dropout masks, and no dropout on attention weights. They run eager, "
    "and differ in what is compared alone; where that is the loss, all have PyTorch's norms. Models that are compiled as a "
    "whole were not compared. reference: PyTorch's operators, everything in fp32 (in fp64 if the run is in fp32). torch and "
    "the tested arm: the run's precision. reordered: torch with the sums of its norms, or of its loss, in another order, which "
    "is what a legitimate change looks like. An error ratio is a distance from the reference, or a shift, divided by the error "
    "that rounding explains. They are means over seeds (geometric means of distances) with Student's intervals. "
    "ablation/parity.py states the statistic and its level."
)


def parity_sentence(parity: Parity, several: bool) -> str:
    """The verdict, with its configuration and arm if there are several."""
    where = f"{capital(label(parity.overrides))}, {parity.arm}: p" if several else "P"
    said = re.sub(r"^parity (holds|fails|does not hold)[ :,;.]*", "", parity.verdict, flags=re.IGNORECASE).rstrip(".")
    return f"{where}arity {'holds' if parity.holds else 'FAILS'}{': ' * bool(said)}{said}."


def parity_sections(found: Sequence[Parity]) -> str:
    return "\n\n".join([*map(parity_section, found), wrapped(PARITY_RULE)]) if found else ""


def parity_section(parity: Parity) -> str:
    size = [one for one in parity.quantities if not one.name.endswith(SHIFT)]
    shift = [replace(one, name=one.name.removesuffix(SHIFT)) for one in parity.quantities if one.name.endswith(SHIFT)]
    over_reordered = f"{parity.arm} over reordered"
    parts = [
        f"### {capital(label(parity.overrides))}, {parity.arm}",
        wrapped(parity_sentence(parity, several=False)),
        _quantities("error ratio", parity.arm, size, over_reordered, lambda one: one.tested.median / one.reordered.median),
        _quantities("shift in one direction", parity.arm, shift, "its size", lambda one: abs(one.tested.median)),
    ]
    return "\n\n".join(part for part in parts if part)


def _quantities(title: str, arm: str, quantities: Sequence[Quantity], by: str, nearness: Callable[[Quantity], float]) -> str:
    """A table of the quantities that failed or came nearest to it; `by` says how that is measured."""
    worst = sorted(quantities, key=lambda one: (one.holds, -nearness(one)))[:MOST_QUANTITIES]
    rows = [
        [one.name, interval_text(one.tested, 2), interval_text(one.reordered, 2), "yes" if one.holds else "NO"] for one in worst
    ]
    if not rows:
        return ""
    kept = markdown([title, f"{arm} (95 %)", "reordered (95 %)", "holds"], rows)
    first = f"The first {len(worst)} of {len(quantities)}" if len(worst) < len(quantities) else "In order"
    return f"{kept}\n\n{first}: what failed, then by {by}. report.json has all."
