"""Which shapes the options of `norms` choose."""

from benchmarks import norms
from benchmarks.cases import CASES, MAX_ELEMENTS, MODEL_WIDTHS

FIRST_OF_SEED_1 = [
    ("add_ln", "fp32", "bf16", 6567, 11784),
    ("dropout_add_rms", "fp32", "fp32", 15708, 13032),
    ("add_ln", "fp32", "fp32", 14121, 456),
]


def parse(*arguments):
    return norms.options_of(arguments)[1]


def test_default_sweep_is_every_case_width_stream_and_provider():
    options = parse()
    shapes = norms.shapes_of(options)
    assert {s.case.name for s in shapes} == set(CASES)
    assert {s.width for s in shapes} == {768, 1024, 1600, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536}
    assert {s.residual for s in shapes if s.case.add} == {"bf16", "fp32"}
    assert {s.residual for s in shapes if not s.case.add} == {None}
    assert options.direction == ["forward", "backward"] and {s.weights for s in shapes} == {"bf16"}
    assert all(s.rows * s.width <= MAX_ELEMENTS and s.rows == min(32768, MAX_ELEMENTS // s.width) for s in shapes)


def test_quick_is_a_small_part_but_what_is_asked_for_stays():
    options = parse("--quick")
    assert len(norms.shapes_of(options)) == 2 and options.rounds == 7
    options = parse("--quick", "--width", "512", "--case", "ln", "--rounds", "9")
    assert [(s.case.name, s.width) for s in norms.shapes_of(options)] == [("ln", 512)] and options.rounds == 9


def test_rows_that_the_cap_makes_equal_are_measured_once():
    options = parse("--case", "ln", "--width", "65536", "--rows", "32768", "16384", "1024")
    assert [(s.rows, s.asked_rows) for s in norms.shapes_of(options)] == [(8192, 32768), (1024, 1024)]


def test_models_are_measured_as_they_train():
    shapes = norms.shapes_of(parse("--models"))
    assert {s.width for s in shapes} == set(MODEL_WIDTHS) and {s.weights for s in shapes} == {"fp32"}
    assert {(s.case.name, s.residual) for s in shapes} == {(n, r) for n, c in CASES.items() if c.add for r in ("bf16", "fp32")}
    assert [s.width for s in norms.shapes_of(parse("--models", "--width", "2304", "--case", "rms"))] == [2304]


def test_drawn_shapes_depend_on_the_seed_alone():
    assert norms.random_shapes(3, 40, 20)[:5] == norms.random_shapes(3, 5) != norms.random_shapes(4, 5)
    first = [(s.case.name, s.residual, s.weights, s.rows, s.width) for s in norms.random_shapes(1, 2, 1)]
    assert first == FIRST_OF_SEED_1, "recorded results say the seed alone"


def test_drawn_shapes_are_of_every_kind_within_bounds():
    large, small = norms.random_shapes(0, 400), norms.random_shapes(0, 0, 400)
    assert len(large) == len(small) == 400
    for shapes, narrowest, least in ((large, 512, 2**26), (small, 256, 2**22)):
        assert all(narrowest <= s.width <= 16384 and s.width % 8 == 0 and s.rows * s.width >= least for s in shapes)
        assert min(s.width for s in shapes) < 1.1 * narrowest and max(s.width for s in shapes) > 15000
        kinds = {(s.case.name, s.residual, s.weights) for s in shapes}
        assert kinds == {
            (n, r, w) for n, c in CASES.items() for r in (("bf16", "fp32") if c.add else (None,)) for w in ("bf16", "fp32")
        }
    assert max(s.rows * s.width for s in small) < 2**26 + 2**14 and {s.rows % 16 == 0 for s in large} == {True, False}
