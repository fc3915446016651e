"""Tables and pictures of recorded norms."""

from benchmarks import report

from .records import ENVIRONMENT, norm


def file(*records):
    return {"environment": ENVIRONMENT, "records": list(records)}


def test_models_have_a_row_each_bold_where_ours_is_faster_by_more_than_chance():
    where = {"residual": "fp32", "weights": "fp32"}
    records = [
        *(norm("add_rms", n, "ours", 0.9, **where) for n in (4608, 2304)), norm("add_rms", 2304, "torch", 0.5, **where),
        norm("add_rms", 2304, "traffic", 0.99, **where),  # of older records: no library
        norm("add_ln", 2304, "ours", 0.8, **where), norm("add_rms", 2304, "ours", 0.1, residual="bf16", weights="fp32"),
        norm("add_ln", 2304, "liger-kernel", 0.79, **where, times_ours_95=[0.99, 1.02]),
    ]  # fmt: skip
    assert report.markdown(file(*records)).splitlines() == [
        "| forward, N = | add+LN | add+RMS |",
        "| --- | ---: | ---: |",
        "| 2304, Gemma 2 2B | 80 / 79 liger | **90** / 50 torch |",
        "| 4608, Gemma 2 27B | – | 90 |",
    ]


def test_a_model_has_a_row_eager_and_compiled_beside_liger_or_where_it_has_none_by_hand():
    def step(model, arm, ms, **over):
        gains = {f"over {base}": [gain, gain - 0.1, gain + 0.1] for base, gain in over.items()}
        return {"model": model, "parameters": 130_000_000, "arm": arm, "ms": ms, "peak_gb": ms / 10} | gains

    records = [
        step("Llama", "torch", 60.0), step("Llama", "adopted", 40.0, torch=1.5, Liger=1.2), step("Llama", "Liger", 48.0),
        step("DiT", "torch", 90.0), step("DiT", "adopted", 60.0, torch=1.5) | {"over by hand": [1.0, 0.9, 1.1]},
        step("DiT", "by hand", 60.0), step("DiT", "compiled", 70.0),
        {"model": "DiT", "arm": "adopted, compiled", "error": "no memory"},
    ]  # fmt: skip
    _, _, *rows = report.adoption(file(*records)).splitlines()
    assert rows == [
        "| Llama, 130M | 60.0 | 40.0 | 48.0 | 1.500 (1.400 to 1.600) | 1.200 (1.100 to 1.300) | 6.0 | 4.0 | 4.8 |",
        "| DiT, 130M | 90.0 | 60.0 | 60.0 | 1.500 (1.400 to 1.600) | 1.000 (0.900 to 1.100) | 9.0 | 6.0 | 6.0 |",
        "| DiT, 130M, compiled | 70.0 | – | – | – | – | 7.0 | – | – |",
    ]
