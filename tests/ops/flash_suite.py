"""FlashAttention's published tests of its Triton norm, pointed at this project's functions.

    python -m tests.ops.flash_suite ../flash-attention -n 8           what follows the checkout is pytest's
    python -m tests.ops.flash_suite --seed 3 ../flash-attention       other inputs than the published ones

Needs a GPU, pytest, einops and a checkout, which is only read. What the tests import is ours, but for the two formulas in
PyTorch that they compare with.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS, SUITE, UTILS = "flash_attn/ops/triton/layer_norm.py", "tests/ops/triton/test_layer_norm.py", "flash_attn/utils"
IMPORTED = """
from flash_attn.ops.triton.theirs import layer_norm_ref, rms_norm_ref
from ops import RMSNorm, layer_norm_fn, layer_norm_linear_fn, rms_norm_fn
"""
RESEEDED = """
import torch
torch.random.manual_seed = lambda given: torch.manual_seed(given + {seed})
"""


def package(checkout: Path, folder: Path, seed: int) -> None:
    """A flash_attn in `folder` with what the tests import. Raises FileNotFoundError if the checkout lacks a file."""
    for needed in (KERNELS, SUITE, UTILS):
        if not (checkout / needed).exists():
            raise FileNotFoundError(f"{checkout} has no {needed}; expected a checkout of flash-attention")
    triton = folder / "flash_attn/ops/triton"
    triton.mkdir(parents=True)
    for module in (triton, triton.parent, triton.parent.parent):
        (module / "__init__.py").touch()
    (folder / UTILS).symlink_to((checkout / UTILS).resolve())
    (triton / "theirs.py").symlink_to((checkout / KERNELS).resolve())
    (triton / "layer_norm.py").write_text(IMPORTED + RESEEDED.format(seed=seed), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="added to the tests' own (%(default)s)")
    parser.add_argument("checkout", type=Path, help="of flash-attention")
    parser.add_argument("pytest", nargs=argparse.REMAINDER, help="options of pytest")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            package(options.checkout, Path(folder), options.seed)
        except FileNotFoundError as error:
            parser.error(str(error))
        paths = [folder, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", *options.pytest]
        suite = (options.checkout / SUITE).resolve()
        # elsewhere than here, whose configuration and conftest are for our own tests
        return subprocess.call([*command, str(suite)], cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})


if __name__ == "__main__":
    raise SystemExit(main())
