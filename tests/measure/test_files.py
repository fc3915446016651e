"""What a full disk, or a changed file, leaves of a result."""

import json
import warnings
from itertools import count

import pytest

from measure import plots
from measure.files import StorageError, replace_text
from measure.store import Store
from tests.resume.stops import in_operation
from tests.runs import no_space


def picture(path):
    figure = plots.pyplot.figure()
    figure.savefig = lambda to, **_: to.write_bytes(b"new")
    plots.finish(figure, "", "", path)


@pytest.mark.parametrize("write", [lambda path: replace_text(path, "new"), picture], ids=["text", "picture"])
def test_a_disk_that_is_full_in_any_operation_leaves_the_old_file_or_the_new_one_and_no_other(tmp_path, write):
    path, failed = tmp_path / "file.png", 0
    for number in count(1):
        path.write_text("old")
        with pytest.MonkeyPatch.context() as patch:
            in_operation(number, no_space, patch.setattr)
            try:
                write(path)
            except StorageError as error:
                failed += "file.png can't be written: No space left on device" in str(error)
        assert path.read_text() in ("old", "new") and list(tmp_path.iterdir()) == [path]
        if failed < number:
            break
    assert failed > 3 and path.read_text() == "new"


# ---- the store ---------------------------------------------------------------------------------------------------------------

DAMAGES = {
    "cut in the middle": lambda lines: [lines[0], lines[1][:20], *lines[2:]],
    "gone": lambda lines: [lines[0], *lines[2:]],
    "swapped": lambda lines: [lines[0], lines[2], lines[1], lines[3]],
    "another number": lambda lines: [lines[0], lines[1].replace("0.125", "0.25"), *lines[2:]],
    "no object": lambda lines: [lines[0], "[]", *lines[2:]],
}


def kept(path):
    store = Store(path, {"gpu": {"name": "H100"}, "seeds": (1, 2)})
    for number in range(3):
        store.add({"number": number, "loss": [number + 0.125, float("nan")], "arm": "日本"})
    return path.read_text().splitlines()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_line_that_is_not_as_it_was_written_is_named_and_what_is_before_it_can_be_kept(tmp_path, damage):
    path = tmp_path / "runs.jsonl"
    lines = kept(path)
    path.write_text("".join(f"{line}\n" for line in damage(lines)))
    wrong = next(at for at, line in enumerate(damage(lines)) if line != lines[at])
    with pytest.raises(ValueError, match=rf"runs\.jsonl: line {wrong + 1} is not as it was written\. Delete it"):
        kept(path)
    path.write_text("".join(f"{line}\n" for line in lines[:wrong]))  # what the message says
    assert [json.loads(line)["number"] for line in kept(path)[1:]] == [*range(max(wrong - 1, 0)), 0, 1, 2]


def test_a_store_goes_on_behind_a_line_that_a_crash_cut_and_refuses_other_facts(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(kept(path))[:-5])
    store = Store(path, {"gpu": {"name": "H100"}, "seeds": [1, 2]})
    assert [line["number"] for line in store.lines] == [0, 1]
    with pytest.raises(ValueError, match=r"runs\.jsonl is of something else: gpu\.name=H200, there H100\."):
        Store(path, {"gpu": {"name": "H200"}, "seeds": [1, 2]})


# ---- pictures ----------------------------------------------------------------------------------------------------------------


def test_names_are_drawn_as_they_are_and_a_character_without_a_glyph_is_escaped(tmp_path):
    figure, axes = plots.pyplot.subplots()
    [line] = axes.plot([1, 2])
    axes.set_ylabel("日本")
    plots.legend_below(figure, {"x_{$": line, "本 $": line})
    texts = lambda: {text.get_text() for text in figure.findobj(plots.pyplot.Text)}  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots.finish(figure, "$5 and $6_{x} \udc80 ×", "", tmp_path / "new")
    assert {r"\u65e5\u672c", "x_{$", r"\u672c $", r"$5 and $6_{x} \udc80 ×"} <= texts()
    assert (tmp_path / "new").read_bytes().startswith(b"\x89PNG") and plots.may_replace(tmp_path / "new")


@pytest.mark.parametrize("low", [3e-7, 70.0])
@pytest.mark.parametrize("ratio", [1.1, 9, 99, 1e7])
def test_a_logarithmic_axis_has_two_to_six_plain_numbers_whatever_it_spans(low, ratio):
    figure, axes = plots.pyplot.subplots(figsize=(8, 1))
    axes.plot([low, low * ratio])
    axes.set_yscale("log")
    plots.bare(axes)
    figure.canvas.draw()
    bottom, top = axes.get_ylim()
    shown = [tick.label1.get_text() for tick in axes.yaxis.get_major_ticks() if bottom <= tick.get_loc() <= top]
    plots.pyplot.close(figure)
    assert 2 <= len(shown) <= 6 and all(bottom < 1.01 * float(text) < 1.03 * top for text in shown)
