"""Paths that can't be read or written, whoever names them: a line that names it, code 2, and nothing is written."""

import pytest

import ablate
import compare
import sample
import train
from training import export, plot

LONG = "l" * 300


def train_main(arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train", lambda *_: pytest.fail("trained"))
        return train.main(arguments)


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        *(
            (train_main, f"{key}={LONG}", f"{LONG}: File name too long")
            for key in ("folder", "resume", "resume=auto folder", "hydra.run.dir")
        ),
        (compare.main, f"study={LONG}", LONG),
        *((ablate.main, f"{key}={LONG}", f"{key}={LONG}: ") for key in ("folder", "init_from")),
        (ablate.main, f"tokenizer.kind=pretrained tokenizer.pretrained={LONG}", f"tokenizer.pretrained={LONG}: is no file"),
        (ablate.main, f"ablate.arms=[torch,fused,nanogpt] ablate.nanogpt={LONG}", f"ablate.nanogpt={LONG}: "),
        (sample.main, LONG, f"{LONG}: not a readable checkpoint: File name too long"),
        (plot.main, LONG, f"left out: {LONG}: File name too long"),
        (export.main, f"--format=gpt2 {LONG}", f"{LONG}: not a readable checkpoint: File name too long"),
        (compare.main, "folder=loop", "folder=loop: File exists"),
        (compare.main, "folder=file/x", "folder=file/x: Not a directory"),
        (compare.main, "--config-dir . study=bad", "study/bad.yaml"),
        (train_main, "--config-dir nowhere", "nowhere' not found"),
    ],
    ids=lambda of: of.replace(LONG, "LONG") if isinstance(of, str) else of.__module__,
)
def test_a_path_that_can_not_be_used_is_named_and_code_2(tiny, here, capsys, program, arguments, message):
    (here / "loop").symlink_to("loop")
    (here / "file").touch()
    (here / "study").mkdir()
    (here / "study" / "bad.yaml").write_text("a: [")
    before = sorted(here.rglob("*"))
    keys = tiny if program in (train_main, ablate.main, compare.main) else []
    two = ["norm.kind=layernorm,rmsnorm"] if program is compare.main else []
    assert program([*keys, *two, *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said and "standard output" not in said
    assert [path for path in sorted(here.rglob("*")) if path != here / "runs"] == before
