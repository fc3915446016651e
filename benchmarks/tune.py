"""Measures tile shapes on this GPU and prints TABLE of ops/tiling.py anew, to paste there.

    python -m benchmarks.tune                                    every width, tiles near those of the present table
    python -m benchmarks.tune --all --width 4096                 many more tiles
    python -m benchmarks.tune --direction backward --norm rms --work add
    python -m benchmarks.tune --weight-dtype fp32                forward with weights in fp32; prints FP32_WEIGHTS

A width's tile is the fastest of those that spill no registers; the present one stays unless that is faster by more than chance,
and with weights in fp32 by 2 %.
Cells that were not asked for stay as they are.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median
from unittest import mock

import torch

from ablation.statistics import Interval, paired_ratio
from benchmarks import command
from benchmarks.candidates import Cell, all_tiles, near_tiles
from benchmarks.cases import BACKWARD, CASES, DIRECTIONS, DTYPES, FORWARD, Inputs, capped_rows, make_inputs, minimum_bytes
from benchmarks.timing import Contender, copy_bandwidth, free_memory, measure, rotating_sets, side_stream
from ops import launch, layer_norm_fn, tiling
from ops.tiling import Tile

NORMS = ("ln", "rms")
WORKS = ("norm", "add", "dropout")
WIDTHS = (32, 64, 128, 256, 512, 768, 1024, 1600, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536)
ROWS = 32768
LEAST_GAIN = 1.02  # by which another tile than the present one is worth a line of FP32_WEIGHTS
KERNEL = {FORWARD: "norm_forward_kernel", BACKWARD: "norm_backward_kernel"}


@dataclass(frozen=True)
class Found:
    tile: Tile
    share: float  # of copy bandwidth
    gain: Interval | None  # how many times as fast as the present tile; None: it is the present one, or that can't run here


def main() -> None:
    options = options_of(sys.argv[1:])
    if not torch.cuda.is_available():
        raise SystemExit("tune measures kernels and needs a GPU; this machine has none")
    device = torch.device("cuda", torch.cuda.current_device())
    cells = cells_of(options)
    facts = launch.device_facts(device)
    candidates = {
        # As a launch would have them: with fewer stages where shared memory is short.
        cell: list(dict.fromkeys(tiling.fit(t, cell.traffic, facts) for t in (all_tiles if options.all else near_tiles)(cell)))
        for cell in cells
    }
    found: dict[Cell, Found] = {}
    with side_stream(device):
        copy = copy_bandwidth(device)
        spilling = compile_all(candidates, options.processes)
        with command.progress(len(cells), "tuning") as bar:
            for cell in cells:
                # With weights in fp32 the present tile may spill too, and what is found is to be compared with it.
                kept = tiling.fit(cell.present, cell.traffic, facts) if options.weight_dtype == "fp32" else None
                tiles = [tile for tile in candidates[cell] if (cell, tile) not in spilling or tile == kept]
                if best := fastest(cell, tiles, device, copy):
                    found[cell] = best
                bar.update()
    print(f"# Measured on {torch.cuda.get_device_name(device)}: the comment is the share of copy bandwidth ({copy:.0f} GB/s).")
    if options.weight_dtype == "fp32":
        found = worth_a_line(found)
    for line in replaced(found):
        print(line)
    if options.weight_dtype == "fp32":
        print(format_fp32_weights(found))
    else:
        tiles_of = {cell: of.tile for cell, of in found.items()}
        print(format_table(merged(tiles_of), {(*cell.key, cell.width): of.share for cell, of in found.items()}))


def cells_of(options: argparse.Namespace) -> list[Cell]:
    return [
        Cell(direction, norm, work, vector, width, DTYPES[options.weight_dtype])
        for direction, norm, work, width in itertools.product(options.direction, options.norm, options.work, options.width)
        for vector in ((8,) if work == "norm" else (8, 4))
    ]


def fastest(cell: Cell, tiles: list[Tile], device: torch.device, copy: float) -> Found | None:
    """The tile with the smallest median time; the present one stays unless that is faster by more than chance.

    The best few of a first look are measured again, beside the present one: the smallest of many short measurements flatters.
    """
    case, rows = CASES[cell.case], capped_rows(ROWS, cell.width)
    residual_bytes = None if cell.setting.residual_dtype is None else cell.setting.residual_dtype.itemsize
    least = minimum_bytes(case, cell.direction, rows, cell.width, residual_bytes=residual_bytes)
    sets = make_inputs(case, cell.setting, rows, cell.width, rotating_sets(least, device, at_most=16), device)
    present = tiling.fit(cell.present, cell.traffic, launch.device_facts(device))
    samples: dict[Tile, list[float]] = {}
    ranked: list[Tile] = []
    for rounds, round_ms, move_outputs in ((5, 0.3, False), (11, 0.7, True)):
        contenders = [_contender(cell, tile, sets) for tile in tiles]
        outcomes = measure(contenders, device, rounds=rounds, round_ms=round_ms, move_outputs=move_outputs)
        samples = {tile: outcomes[str(tile)].us for tile in tiles if outcomes[str(tile)].us}
        ranked = sorted(samples, key=lambda tile: median(samples[tile]))
        tiles = list(dict.fromkeys([*ranked[:5], *(tile for tile in ranked if tile == present)]))
    del sets
    free_memory(device)
    if not ranked:
        return None
    best, gain = ranked[0], None
    if present in samples and best != present:
        gain = paired_ratio(samples[present], samples[best])
        if gain.low <= 1:
            best, gain = present, None
    return Found(best, least / median(samples[best]) / 1000 / copy, gain)


def _contender(cell: Cell, tile: Tile, sets: list[Inputs]) -> Contender:
    def build():
        def call(inputs):
            with using(cell.direction, tile):
                return run(cell, inputs)

        if cell.direction == FORWARD:
            return [lambda inputs=inputs: call(inputs) for inputs in sets]
        forwards = [run(cell, inputs) for inputs in sets]

        def backward(inputs, outputs):
            with using(cell.direction, tile):
                return torch.autograd.grad(outputs, inputs.leaves, inputs.upstream, retain_graph=True)

        return [lambda pair=pair: backward(*pair) for pair in zip(sets, forwards, strict=True)]

    return Contender(str(tile), build)


def run(cell: Cell, inputs: Inputs):
    outputs = layer_norm_fn(
        inputs.x, inputs.weight, inputs.bias, inputs.residual, is_rms_norm=cell.norm == "rms", prenorm=cell.work != "norm",
        dropout_p=0.1 if cell.work == "dropout" else 0.0, eps=1e-5, seed=inputs.seed,
    )  # fmt: skip
    return outputs if isinstance(outputs, tuple) else (outputs,)


class using:
    """Launches of one direction get this tile and are compiled for it."""

    def __init__(self, direction: str, tile: Tile) -> None:
        self.patch = mock.patch.object(launch, f"{direction}_tile", lambda n, work, device: tile)

    def __enter__(self) -> None:
        self.patch.start()
        launch.forget()

    def __exit__(self, *_) -> None:
        self.patch.stop()
        launch.forget()


def compile_all(candidates: dict[Cell, list[Tile]], processes: int) -> set[tuple[Cell, Tile]]:
    """Compiles in parallel, into Triton's cache on disk; the pairs that spill registers or don't compile."""
    spilling = set()
    jobs = [(cell, tile) for cell, tiles in candidates.items() for tile in tiles]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool, command.progress(len(jobs), "compiling") as bar:
        for future in as_completed([pool.submit(spills, *job) for job in jobs]):
            cell, tile, spilled = future.result()
            if spilled:
                spilling.add((cell, tile))
            bar.update()
    return spilling


def spills(cell: Cell, tile: Tile) -> tuple[Cell, Tile, bool]:
    """Runs the tile once on a few rows; whether it spills registers, or fails."""
    device = torch.device("cuda", 0)
    (inputs,) = make_inputs(CASES[cell.case], cell.setting, 2 * tile.rows, cell.width, 1, device)
    recorder = Recorder(getattr(launch, KERNEL[cell.direction]))
    with mock.patch.object(launch, KERNEL[cell.direction], recorder), using(cell.direction, tile):
        try:
            outputs = run(cell, inputs)
            if cell.direction == BACKWARD:
                torch.autograd.grad(outputs, inputs.leaves, inputs.upstream)
        except Exception:
            return cell, tile, True
    return cell, tile, recorder.compiled[-1].n_spills > 0


class Recorder:
    """A kernel that keeps what it compiled."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel
        self.compiled: list = []

    def __getattr__(self, name: str):
        return getattr(self.kernel, name)

    def __getitem__(self, grid):
        def start(*arguments, **constants):
            compiled = self.kernel[grid](*arguments, **constants)
            self.compiled.append(compiled)
            return compiled

        return start


def replaced(found: dict[Cell, Found]) -> list[str]:
    """A line of Python comment for each tile that takes the place of a slower one."""
    lines = []
    for cell, of in found.items():
        if (gain := of.gain) is not None:
            name = " ".join(map(str, (*cell.key, cell.width)))
            lines.append(f"# {name}: {gain.median:.3f} ({gain.low:.3f} to {gain.high:.3f}) times as fast")
    return lines


def worth_a_line(found: dict[Cell, Found]) -> dict[Cell, Found]:
    """What is faster than the present tile by LEAST_GAIN."""
    return {cell: of for cell, of in found.items() if of.gain is not None and of.gain.median >= LEAST_GAIN}


def merged(found: dict[Cell, Tile]) -> dict:
    """The present table with what was found in its places."""
    table = {key: dict(entries) for key, entries in tiling.TABLE.items()}
    for cell, tile in found.items():
        table.setdefault(cell.key, {})[cell.width] = tile
    return {key: tuple(sorted(entries.items())) for key, entries in table.items()}


def format_table(table: dict, shares: dict | None = None) -> str:
    """Python source of TABLE; shares: by (*key, width)."""
    lines = ["TABLE: dict[tuple[str, str, str, int], tuple[tuple[int, Tile], ...]] = {"]
    for key, entries in table.items():
        lines.append(f"    {key!r}: (".replace("'", '"'))
        for width, tile in entries:
            share = (shares or {}).get((*key, width))
            lines.append(f"        ({width}, {_source(tile)})," + ("" if share is None else f"  # {share:.2f}"))
        lines.append("    ),")
    return "\n".join([*lines, "}"])


def format_fp32_weights(found: dict[Cell, Found]) -> str:
    """Python source of FP32_WEIGHTS: what is there with what was found in its places, whose shares it has before and after."""
    new = {(cell.norm, cell.work, cell.vector, cell.width): of for cell, of in found.items()}
    lines = ["FP32_WEIGHTS: dict[tuple[str, str, int, int], Tile] = {"]
    for key, tile in (tiling.FP32_WEIGHTS | {key: of.tile for key, of in new.items()}).items():
        line = f"    {key!r}: {_source(tile)},".replace("'", '"')
        if (of := new.get(key)) and of.gain:
            line += f"  # {of.share:.2f}, {of.share / of.gain.median:.2f}"
        lines.append(line)
    return "\n".join([*lines, "}"])


def _source(t: Tile) -> str:
    fields = f"{t.rows}, {t.block_n}, {t.tail_n}, {t.slices}, {t.warps}, {t.stages}, {t.programs_per_sm}, {t.hold_weights}"
    fields += f", {t.max_registers}" if t.max_registers or t.columns else ""
    fields += f", {t.columns}" if t.columns else ""
    fields += ", draws_first=True" if t.draws_first else ""
    fields += f", lag={t.lag}" if t.lag > 1 else ""
    fields += ", one_pass=True" if t.one_pass else ""
    fields += ", past_l1=True" if t.past_l1 else ""
    fields += ", prefetch_l2=True" if t.prefetch_l2 else ""
    fields += f", prefetch_ahead={t.prefetch_ahead}" if t.prefetch_ahead else ""
    return f"Tile({fields})"


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__.split("\n\n")[0])
    parser.add_argument("--direction", nargs="+", choices=DIRECTIONS, help="(both; forward alone with weights in fp32)")
    parser.add_argument("--norm", nargs="+", choices=NORMS, default=list(NORMS))
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--width", nargs="+", type=command.positive, default=list(WIDTHS), metavar="N")
    parser.add_argument("--weight-dtype", choices=("bf16", "fp32"), default="bf16", help="weights and biases (%(default)s)")
    parser.add_argument("--all", action="store_true", help="many more tiles than those near the present ones")
    parser.add_argument("--processes", type=int, default=12, help="that compile in parallel (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.weight_dtype == "fp32" and BACKWARD in (options.direction or ()):
        parser.error("--weight-dtype fp32: tiles for such weights are forward's alone; leave --direction backward out")
    known = {width for entries in tiling.TABLE.values() for width, _ in entries}
    if options.weight_dtype == "fp32" and (unknown := [width for width in options.width if width not in known]):
        parser.error(
            f"--weight-dtype fp32: --width {unknown[0]} is no entry of TABLE, by whose widths FP32_WEIGHTS is looked up"
        )
    options.direction = options.direction or ([FORWARD] if options.weight_dtype == "fp32" else list(DIRECTIONS))
    return options


if __name__ == "__main__":
    main()
