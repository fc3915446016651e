"""The cycles of an ablation that was stopped: read again as they were, and what a killed process or a bad disk left of them."""

import re

import pytest

from ablation.kept import FILE, Cycle, Kept
from configs import ConfigError

FACTS = {"gpu.name": "none", "model.width": 32}
CYCLES = [Cycle({"seed": "1"}, "eager", 3, {"torch": [[1.5, 2.0], [i / 8, 2.5]]}, {"torch": [0.0]}) for i in range(3)]


@pytest.fixture
def folder(tmp_path):
    """With three cycles on disk."""
    kept = Kept(tmp_path, FACTS)
    for cycle in CYCLES:
        kept.add(cycle)
    return tmp_path


def of(kept: Kept) -> list[Cycle]:
    return kept.of({"seed": "1"}, "eager", ["torch"])


def test_cycles_are_read_as_they_were_kept(folder):
    assert of(Kept.read(folder, FACTS)) == CYCLES
    with pytest.raises(ConfigError, match=r"of something else: model\.width=64, there 32"):
        Kept.read(folder, FACTS | {"model.width": 64})


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_last_line_without_its_end_is_dropped_and_the_next_cycle_takes_its_place(folder, cut):
    whole = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(whole[:-cut])
    kept = Kept.read(folder, FACTS)
    assert of(kept) == CYCLES[:2]
    kept.add(CYCLES[2])
    assert (folder / FILE).read_bytes() == whole


@pytest.mark.parametrize(
    "damage", [lambda line: line[:20], lambda line: b"\xff\0" + line, lambda line: b"{}", lambda line: b"[1]", lambda line: b""]
)
@pytest.mark.parametrize("number", [1, 2, 4])
def test_any_other_damage_is_an_error_with_file_line_and_remedy(folder, number, damage):
    lines = (folder / FILE).read_bytes().splitlines(keepends=True)
    lines[number - 1] = damage(lines[number - 1].rstrip()) + b"\n"
    (folder / FILE).write_bytes(b"".join(lines))
    remedy = "Begin anew" if number == 1 else "Delete this line"
    expected = rf"cycles\.jsonl, line {number}: is damaged \(.*\)\. {remedy}|its cycles are of something else"
    with pytest.raises(ConfigError, match=expected) as error:
        Kept.read(folder, FACTS)
    assert re.search("something else", str(error.value)) is None or number == 1


def test_a_file_cut_in_its_first_line_has_nothing_to_go_on_with(folder):
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:10])
    with pytest.raises(ConfigError, match=r"cycles\.jsonl, line 1: is cut off\. Begin anew"):
        Kept.read(folder, FACTS)
