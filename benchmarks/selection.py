"""Which shapes `norms` measures: a sweep over widths, the widths of well-known models, or shapes drawn at random."""

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks import command
from benchmarks.cases import CASES, DTYPES, Case, Setting, capped_rows

ROWS = 32768
WIDTHS = (768, 1024, 1600, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536)
SMALL_WIDTHS = (32, 64, 128, 256, 512)
MODEL_WIDTHS = {  # of whose hidden state
    1152: "Gemma 3 1B", 1536: "Qwen2.5 1.5B", 2304: "Gemma 2 2B", 2560: "Qwen3 4B", 2880: "gpt-oss", 3072: "Llama 3.2 3B",
    3584: "Qwen2.5 7B", 4608: "Gemma 2 27B", 5120: "Qwen3 32B", 5376: "Gemma 3 27B", 6144: "Mixtral 8x22B",
    7168: "DeepSeek-V3", 8192: "Llama 3 70B", 14336: "BLOOM 176B",
}  # fmt: skip
QUICK_CASES, QUICK_WIDTHS = ("add_rms", "dropout_add_ln"), (4096,)
WIDEST = 16384  # of what is drawn
# The tensors that six libraries keep for backward, on two sets of inputs with a stream in fp32, fit 80 GB.
MOST_ELEMENTS = 2**28
SWEEP, MODELS, RANDOM = "norms", "norms_models", "norms_random"  # each has a file of results


@dataclass(frozen=True)
class Shape:
    """What shares inputs and compiled functions: both directions of a case."""

    case: Case
    residual: str | None  # names of dtypes
    weights: str
    rows: int
    width: int
    asked_rows: int  # before the cap on elements

    @property
    def setting(self) -> Setting:
        residual = DTYPES[self.residual] if self.residual else None
        return Setting(residual_dtype=residual, weight_dtype=DTYPES[self.weights])

    def __str__(self) -> str:
        stream = f" {self.residual} stream" if self.residual else ""
        return f"{self.case.name} {self.rows}×{self.width}{stream}, {self.weights} weights"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), metavar="CASE", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--width", nargs="+", type=command.positive, metavar="N", help=f"row widths ({WIDTHS})")
    parser.add_argument("--small", action="store_true", help=f"the widths {SMALL_WIDTHS} instead")
    parser.add_argument(
        "--rows", nargs="+", type=command.positive, metavar="M",
        help=f"rows ({ROWS}, {command.CPU_ROWS} on the CPU); fewer above 2^29 elements, 2^28 with --models",
    )  # fmt: skip
    parser.add_argument("--residual", nargs="+", choices=("bf16", "fp32"), help="dtype of the residual stream (both)")
    parser.add_argument(
        "--weight-dtype", nargs="+", choices=("bf16", "fp32"), help="weights and biases (bf16; fp32 with --models)"
    )
    parser.add_argument(
        "--models", action="store_true",
        help=f"the widths of well-known models, {tuple(MODEL_WIDTHS)}, as they train: fp32 weights, cases with a stream",
    )  # fmt: skip
    parser.add_argument(
        "--random", nargs="+", type=int, metavar="COUNT",
        help=f"COUNT shapes drawn at random, from 512 to {WIDEST} columns and from 2^26 elements up; a second COUNT draws "
        "smaller ones, from 256 columns and 2^22 elements up",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of --random (%(default)s)")


def settle(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Checks the options and fills in those that were not given."""
    chosen = [f"--{n}" for n in ("case", "width", "small", "rows", "residual", "weight_dtype", "models") if getattr(options, n)]
    if options.random and chosen:
        parser.error(f"--random draws the shapes; leave {', '.join(chosen).replace('_', '-')} out")
    if options.random and (len(options.random) > 2 or min(options.random) < 0):
        parser.error("--random takes one count or two, 0 or more")
    if options.small and (options.width or options.models):
        parser.error("--small, --width and --models choose the widths; leave --small out")
    options.name = RANDOM if options.random else MODELS if options.models else SWEEP
    widths = SMALL_WIDTHS if options.small else QUICK_WIDTHS if options.quick else MODEL_WIDTHS if options.models else WIDTHS
    cases = QUICK_CASES if options.quick else [n for n, case in CASES.items() if case.add or not options.models]
    options.rows = options.rows or [command.rows_on(options.device, ROWS)]
    options.case = options.case or list(cases)
    options.width = options.width or list(widths)
    options.residual = options.residual or (["bf16"] if options.quick and not options.models else ["bf16", "fp32"])
    options.weight_dtype = options.weight_dtype or ["fp32" if options.models else "bf16"]


def shapes(options: argparse.Namespace) -> list[Shape]:
    """In the order in which they run: widths outermost, so that a run that ends early has whole columns."""
    if options.random:
        found = drawn(options.seed, *options.random)
        return found if options.device == "cuda" else [replace(s, rows=min(s.rows, command.CPU_ROWS)) for s in found]
    most = {"most": MOST_ELEMENTS} if options.models else {}
    by_cell: dict[tuple[object, ...], Shape] = {}
    for width in options.width:
        for name in options.case:
            for weights in options.weight_dtype:
                for residual in options.residual if CASES[name].add else (None,):
                    for asked in options.rows:
                        rows = capped_rows(asked, width, **most)
                        shape = Shape(CASES[name], residual, weights, rows, width, asked)
                        by_cell.setdefault((name, weights, residual, rows, width), shape)
    return list(by_cell.values())


def drawn(seed: int, large: int, small: int = 0) -> list[Shape]:
    """Shapes by the seed alone; a larger number of them begins with those of a smaller one."""
    return [
        *_drawn(random.Random(f"{seed} large"), large, narrowest=512, elements=(26, math.log2(MOST_ELEMENTS))),
        *_drawn(random.Random(f"{seed} small"), small, narrowest=256, elements=(22, 26)),
    ]


def _drawn(draw: random.Random, count: int, narrowest: int, elements: tuple[float, float]) -> Sequence[Shape]:
    """Widths and elements (of which the powers of two are given) are as likely in each octave."""
    found = []
    for _ in range(count):
        width = 8 * round(2 ** draw.uniform(math.log2(narrowest), math.log2(WIDEST)) / 8)
        rows = math.ceil(2 ** draw.uniform(*elements) / width)
        rows = min(rows, max(65536, math.ceil(2 ** elements[0] / width)))
        case, residual, weights = draw.choice(list(CASES.values())), *(draw.choice(("bf16", "fp32")) for _ in range(2))
        found.append(Shape(case, residual if case.add else None, weights, rows, width, rows))
    return found
