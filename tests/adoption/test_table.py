"""The table of adopted models."""

import pytest

from adoption import table


def test_a_model_that_is_named_is_adopted_and_compared(capsys):
    pytest.importorskip("transformers")
    table.main(["llama"])
    row, *_ = capsys.readouterr().out.splitlines()
    assert " ".join(row.split()) == "llama 5 of 5 4 adds 2 of 2 in one kernel 2 of 2 in one kernel yes"


def test_the_page_is_not_written_without_a_library_that_it_has_models_of(monkeypatch, tmp_path):
    monkeypatch.setattr(table, "TABLE", tmp_path / "adopted_models.md")
    monkeypatch.setattr(table, "MODELS", table.MODELS | {"transformers": "", "timm": "vit_tiny", "diffusers": {}})
    monkeypatch.setattr(table, "find_spec", lambda name: None if name == "timm" else object())
    with pytest.raises(SystemExit, match=r"models of timm\. Install them"):
        table.main([])
    assert not table.TABLE.exists()
