"""The cycles of an ablation that was stopped: read again as they were, and refused if they are of something else or damaged."""

import re

import pytest

from ablation.kept import FILE, Cycle, Kept
from configs import ConfigError

FACTS = {"gpu.name": "none", "model.width": 32}
CYCLES = [Cycle({"seed": "1"}, "eager", {"torch": [[1.5, 2.0], [i / 8, 2.5]]}) for i in range(3)]


def test_cycles_are_read_as_they_were_kept_and_not_beside_other_facts_or_from_a_damaged_file(tmp_path):
    kept = Kept(tmp_path, FACTS)
    for cycle in CYCLES:
        kept.add(cycle)
    again = Kept(tmp_path, FACTS)
    assert (
        again.of({"seed": "1"}, "eager", ["torch"]) == [cycle.blocks_ms for cycle in CYCLES]
        and str(again) == "3 of eager, seed=1"
    )
    assert not again.of({"seed": "1"}, "eager", ["torch", "fused"]) and not again.of({}, "eager", ["torch"])
    with pytest.raises(ConfigError, match=r"of something else: model\.width=64, there 32"):
        Kept(tmp_path, FACTS | {"model.width": 64})
    for text in ("", "{", "{}\n{}\n", (tmp_path / FILE).read_text()[:-9]):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ConfigError, match=rf"{re.escape(FILE)} is damaged \(.*\)\. Begin anew"):
            Kept(tmp_path, FACTS)
