"""The section on parity of an ablation's report."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from ablation.records import Parity
from ablation.rounding import Quantity
from measure.tables import capital, interval_text, label, loss, markdown, signed, wrapped

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
    arms = list(parity.val_loss)
    rows = [[str(seed), *(loss(parity.val_loss[arm][i]) for arm in arms)] for i, seed in enumerate(parity.seeds)]
    if len(parity.seeds) > 1:
        rows.append(["mean", *(loss(fmean(parity.val_loss[arm])) for arm in arms)])
        spread_words = (
            f"mean and 95 % t-interval, paired by seed; standard deviation of torch's over seeds {parity.val_spread:.3g}."
        )
    else:
        spread_words = "of one seed, so without an interval."
    difference = interval_text(parity.val_difference, 6) if len(parity.seeds) > 1 else signed(parity.val_difference.median, 6)
    parts = [
        f"### {capital(label(parity.overrides))}, {parity.arm}",
        wrapped(parity_sentence(parity, several=False)),
        _quantities(
            "error ratio",
            parity.arm,
            size,
            f"{parity.arm} over reordered",
            lambda one: one.tested.median / max(one.reordered.median, 1e-9),
        ),
        _quantities("shift in one direction", parity.arm, shift, "its size", lambda one: abs(one.tested.median)),
        "Final validation loss, nats per token:",
        markdown(["seed", *arms], rows),
        wrapped(f"{capital(parity.arm)} − torch {difference}, {spread_words}"),
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
    if len(worst) < len(quantities):
        order = f"The first {len(worst)} of {len(quantities)}: what failed, then by {by}. report.json has all."
    else:
        order = f"In order: what failed, then by {by}."
    return f"{kept}\n\n{order}"
