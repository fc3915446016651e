"""Which code a record describes: a fingerprint of the sources that what was measured is made of.

A record is old once these sources differ, and not before: comments, docstrings and blank lines don't count, nor does other
code. Records of kernels depend on the files of these kernels and of their tiles, those of the host's time and of memory also on
what a call of a norm runs through, those of a training step on all kernels, the model and the step.
"""

import ast
import hashlib
import io
import tokenize
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


def _ops(*names: str) -> tuple[str, ...]:
    return tuple(f"ops/{name}.py" for name in names)


NORMS = _ops(
    "kernels/backward", "kernels/constants", "kernels/dropout", "kernels/exchange", "kernels/forward", "kernels/norms",
    "kernels/nvidia", "kernels/rows", "kernels/weight_gradients", "tiling",
)  # fmt: skip
ROTARY = _ops("kernels/constants", "kernels/norms", "kernels/nvidia", "kernels/rotary", "kernels/rows", "rotary")
LOSSES = _ops(
    "kernels/constants", "kernels/cross_entropy", "kernels/nvidia", "kernels/rows", "kernels/softmax", "loss", "softmax",
)  # fmt: skip
ACTIVATION = _ops("activation", "kernels/activation", "kernels/constants", "kernels/nvidia", "kernels/rows")
CALLS = _ops("checks", "kit", "norm", "philox", "records", "reference", "torch_state")
STEP = (
    "ops/kernels", "ops/tiling.py", "model", "training/build.py", "training/inputs.py", "training/optimizer.py",
    "training/precision.py", "training/step.py",
)  # fmt: skip
SOURCES: Mapping[str, tuple[str, ...]] = {
    "norms": NORMS,
    "rotary": ROTARY,
    "losses": LOSSES,
    "activation": ACTIVATION,
    "calls": (*NORMS, *CALLS),
    "step": STEP,
    "study": ("measure/differences.py", "study/analysis.py", "study/plan.py", "study/runs.py"),
    "ranks": (*STEP, "training/distributed.py", "training/sharding.py"),
}
OF_RECORD = {  # of all others, norms_models, norms_random and sites among them: norms
    "rotary": "rotary", "losses": "losses", "activation": "activation",
    "host": "calls", "memory": "calls", "ablation": "step", "scaling": "ranks",
    "study_errors": "study",
}  # fmt: skip


def fingerprints() -> dict[str, str]:
    """By what depends on it, the fingerprint of the code that runs."""
    return {what: _fingerprint(paths) for what, paths in SOURCES.items()}


def _fingerprint(paths: tuple[str, ...]) -> str:
    """Of files, and of all files of a folder."""
    files = {}
    for path in paths:
        for file in [ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"):
            if file.is_file():
                files[file.relative_to(ROOT).as_posix()] = file.read_text(encoding="utf-8")
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\n{stripped(files[name])}\n".encode())
    return digest.hexdigest()[:16]


@cache
def stripped(source: str) -> str:
    """The lines of code, without comments, docstrings and blank lines."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            for number in range(text.lineno - 1, text.end_lineno or text.lineno):
                lines[number] = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())
