"""A training step of transformers' Llama, Qwen3 and Gemma 3, eager: as it is, adopted, and with Liger's kernels.

    pip install 'transformers>=5.20' liger-kernel
    python -m benchmarks.adoption                      about 110M parameters each, random weights, 24 × 1024 tokens a step
    python -m benchmarks.adoption --model Llama --weights bf16 --vocabulary 128256

A step is forward, backward and a fused AdamW update. With weights in fp32, forward runs under autocast to bf16, as with
`bf16=True` of Trainer. All arms of a model are in one process, in short blocks that alternate. Arms with "plain loss" have
transformers' loss, so that the gain of prenorm's or Liger's loss is seen by itself. An arm whose first loss or gradient is
not that of the plain model is an error.
"""

import argparse
import copy
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import command
from benchmarks.command import Record
from measure.clock import StepClock
from measure.comparison import AGAIN, TORCH, compare_blocks, cycle_times
from measure.schedule import LEAD_IN, run_blocks
from measure.statistics import LEAST_SAMPLES, Interval, spread
from measure.tables import NOTHING, aligned, interval_text, number
from ops import adopt

ADOPTED, ADOPTED_PLAIN, LIGER, LIGER_PLAIN = "adopted", "adopted, plain loss", "Liger", "Liger, plain loss"
BOTH = "adopted, with Liger's MLP and rotary"
ARMS = (TORCH, AGAIN, ADOPTED, ADOPTED_PLAIN, LIGER, LIGER_PLAIN, BOTH)
BASES = (TORCH, LIGER, LIGER_PLAIN)  # that others are compared with
PLAIN_LOSS = {ADOPTED: ADOPTED_PLAIN, LIGER: LIGER_PLAIN}
SAME = 0.02  # of the loss and the gradient's norm, relative: rounding to bf16 stays below
WARM_UP = 3  # steps of each arm
_WIDE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "tie_word_embeddings": True}
SIZES: dict[str, dict[str, Any]] = {
    "Llama": _WIDE | {"num_attention_heads": 12, "num_key_value_heads": 12},
    "Qwen3": _WIDE | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128},
    "Gemma3": _WIDE
    | {"hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
}
TINY = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}  # on the CPU


class Arm:
    """A model that is trained, and the rotary function that its attention finds in `modeling`, where Liger puts its own."""

    def __init__(self, name: str, kind: str, modeling: Any, plain: nn.Module) -> None:
        self.model: Any = copy.deepcopy(plain)
        before = dict(vars(modeling))
        if "Liger" in name:
            suffix = {"Gemma3": "gemma3_text"}.get(kind, kind.lower())
            apply = getattr(import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{suffix}")
            apply(model=self.model, rms_norm=name != BOTH, fused_linear_cross_entropy=name == LIGER)
        self.modeling, self.rotary = modeling, modeling.apply_rotary_pos_emb
        vars(modeling).update(before)
        if "adopted" in name:
            adopt(self.model, loss=name != ADOPTED_PLAIN, verbose=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self, tokens: Tensor, autocast: Any) -> Tensor:
        self.modeling.apply_rotary_pos_emb = self.rotary
        with autocast:
            loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def first_step(self, tokens: Tensor, autocast: Any) -> Record:
        """Loss, norm of the gradient, and on a GPU the memory that the step takes beside what stays."""
        norms: list[Tensor] = []
        hook = self.optimizer.register_step_pre_hook(
            lambda *_: norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()]))
        )
        self.step(tokens, autocast)  # makes the optimizer's state
        hook.remove()
        found: Record = {}
        if tokens.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        loss = self.step(tokens, autocast)
        if tokens.is_cuda:
            found["peak_gb"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
        return found | {"loss": loss.item(), "gradient": norms[0].item()}


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adoption", description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=tuple(SIZES), default=list(SIZES), help="(all)")
    parser.add_argument("--weights", choices=("fp32", "bf16"), default="fp32", help="(fp32, under autocast to bf16)")
    parser.add_argument("--vocabulary", type=command.positive, default=32768, help="tokens in it, on a GPU (%(default)s)")
    parser.add_argument("--batch", type=command.positive, default=24, help="sequences of 1024 tokens, on a GPU (%(default)s)")
    parser.add_argument("--rounds", type=command.positive, default=LEAST_SAMPLES, help="cycles of blocks (%(default)s)")
    parser.add_argument("--steps", type=command.positive, default=2, help="of a block that count (%(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try the program (%(default)s)")
    parser.add_argument("--output", type=Path, help="folder of the record (benchmarks/results/<gpu>)")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here; --device cpu tries the program on small sizes")
    if options.rounds < LEAST_SAMPLES:
        parser.error(f"--rounds {options.rounds}: intervals need {LEAST_SAMPLES} or more")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of(argv)
    if options.device == "cpu":
        torch.set_num_threads(1)  # more threads make so small a model slower
    why, libraries = without_liger(options.device), {"transformers": version("transformers")}
    if why:
        print(f"Liger's arms are left out: {why}")
    else:
        libraries["liger-kernel"] = version("liger-kernel")
    facts = command.environment(torch.device(options.device), libraries)
    folder = options.output or command.FOLDER / command.slug(facts)
    words = shlex.join(["python", "-m", "benchmarks.adoption", *(sys.argv[1:] if argv is None else argv)])
    results = command.Results(folder / "adoption.json", facts, words)
    for kind in options.model:
        results.add(records := measure(kind, [name for name in ARMS if not (why and "Liger" in name)], options))
        print(f"\n{summary(records)}", flush=True)
    results.finish()


def without_liger(device: str) -> str:
    """Why its arms can't run; empty if they can."""
    if device != "cuda":
        return "its kernels need a GPU"
    try:
        import_module("liger_kernel.transformers")
    except Exception as error:  # more than ImportError where it does not go with transformers
        return f"liger_kernel.transformers can't be imported, {type(error).__name__}: {error}"
    return ""


def measure(kind: str, names: Sequence[str], options: argparse.Namespace) -> list[Record]:
    """A record for each arm, with its speed-up over others; or with an error."""
    device, on_gpu = torch.device(options.device), options.device == "cuda"
    vocabulary, shape = (options.vocabulary, (options.batch, 1024)) if on_gpu else (256, (2, 32))
    modeling: Any = import_module(f"transformers.models.{kind.lower()}.modeling_{kind.lower()}")
    sizes = SIZES[kind] | ({} if on_gpu else TINY) | {"vocab_size": vocabulary, "pad_token_id": 0}
    torch.manual_seed(0)
    config = getattr(modeling, {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config"))(**sizes)
    dtype = torch.bfloat16 if options.weights == "bf16" else torch.float32
    plain = getattr(modeling, f"{kind}ForCausalLM")(config).to(device, dtype).train()
    tokens = torch.randint(vocabulary, shape, device=device)
    autocast = torch.autocast("cuda", torch.bfloat16) if on_gpu and options.weights == "fp32" else nullcontext()
    cell: Record = {"model": kind, "parameters": sum(p.numel() for p in plain.parameters()), "weights": options.weights}
    cell |= {"vocabulary": vocabulary, "tokens": tokens.numel()}

    records: dict[str, Record] = {name: cell | {"arm": name} for name in names}
    arms: dict[str, Arm] = {}
    rotary = modeling.apply_rotary_pos_emb
    try:
        for name, record in records.items():
            try:
                arm = Arm(name, kind, modeling, plain)
                record |= arm.first_step(tokens, autocast)
                check(record, records[TORCH])
                for _ in range(WARM_UP):
                    arm.step(tokens, autocast)
                arms[name] = arm
            except Exception as error:  # of somebody's library: the others are measured
                record["error"] = f"{type(error).__name__}: {error}"

        def block(name: str, cycle: int) -> list[float]:
            clock = StepClock(device, warmup=LEAD_IN)
            for _ in range(LEAD_IN + options.steps):
                with clock.step():
                    arms[name].step(tokens, autocast)
            return list(clock.steps_ms)

        blocks = run_blocks(block, list(arms), options.rounds, seed=0)
    finally:
        modeling.apply_rotary_pos_emb = rotary
    for name in arms:
        times = spread(cycle_times(blocks[name]))
        records[name] |= {"ms": round(times.median, 3), "p10": round(times.p10, 3), "p90": round(times.p90, 3)}
        for base in [base for base in (*BASES, PLAIN_LOSS.get(name)) if base in arms and base != name]:
            ratio = compare_blocks(blocks[base], blocks[name]).speedup
            records[name][f"over {base}"] = [round(value, 4) for value in (ratio.median, ratio.low, ratio.high)]
    return list(records.values())


def check(record: Record, plain: Record) -> None:
    """Raises ArithmeticError if an arm has another first loss or gradient than the plain model."""
    for what in ("loss", "gradient"):
        if not abs(record[what] - plain[what]) < SAME * plain[what]:
            raise ArithmeticError(f"its first {what} is {record[what]:.5g}, expected {plain[what]:.5g}")


def summary(records: Sequence[Record]) -> str:
    """Its table, and what of the gain is the loss."""
    first = records[0]
    title = (
        f"{first['model']}, {first['parameters'] / 1e6:.0f}M parameters in {first['weights']}, {first['tokens']} tokens a step"
    )
    bases = [base for base in BASES if any(f"over {base}" in record for record in records)]
    header = [title, "ms", "GiB a step", *(f"× as fast as {base}" for base in bases)]
    rows = [
        [
            record["arm"],
            number(record["ms"]),
            f"{record['peak_gb']:.2f}" if "peak_gb" in record else NOTHING,
            *(ratio(record, base) for base in bases),
        ]
        for record in records
        if "ms" in record
    ]
    loss = [
        f"The loss alone: {record['arm']} is {ratio(record, other)} × as fast as with the plain loss"
        for record in records
        if (other := PLAIN_LOSS.get(record["arm"])) and f"over {other}" in record
    ]
    return "\n".join(
        [
            aligned(header, rows),
            *loss,
            *(f"failed: {record['arm']}: {record['error']}" for record in records if "error" in record),
        ]
    )


def ratio(record: Record, base: str) -> str:
    found = record.get(f"over {base}")
    return interval_text(Interval(*found)) if found else NOTHING


if __name__ == "__main__":
    main()
