"""A run whose output nobody reads any more, as of `train.py 2>&1 | tee log`, whose tee the same Ctrl-C has ended."""

import os
import signal
import sys

from tests.resume.stops import stop_with
from training import storage


def test_ctrl_c_makes_a_checkpoint_though_nobody_reads_what_the_run_shows(tiny, tmp_path, monkeypatch):
    for name in ("stdout", "stderr"):
        reader, writer = os.pipe()
        os.close(reader)
        monkeypatch.setattr(sys, name, os.fdopen(writer, "w"))

    code = stop_with(signal.SIGINT, 4, [*tiny, "logging.every=1"], tmp_path / "run")

    assert code == 130
    assert [storage.step_of(path) for path in storage.kept(tmp_path / "run")] == [4]
    sys.stdout.close()  # with what was still in its buffer
    sys.stderr.close()
