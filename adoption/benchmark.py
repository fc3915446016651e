"""A training step of transformers' Llama, Qwen3 and Gemma 3, and of two DiTs: as it is, adopted, with Liger's kernels or by
hand, and compiled.

    pip install 'transformers>=5.20' liger-kernel
    python -m adoption.benchmark            random weights; a step has 24 × 1024 tokens, of a DiT 64 samples of 256 or 1024
    python -m adoption.benchmark --model DiT-B/2    this alone, which needs neither library

A step is forward under autocast to bf16 with weights in fp32, as with `bf16=True` of Trainer, backward and a fused AdamW
update. All arms of a model are in one process, in short blocks that alternate. Arms with "plain loss" have transformers' loss,
so that the gain of prenorm's or Liger's loss is seen by itself; with "own rotary", queries and keys are turned and normed as
they were, with "own MLP" the MLP is. The DiT is that of examples/dit_block.py; its arms "by hand" are the example's second
version. The compiled arms are whole models under torch.compile. An arm whose first loss or gradient is not that of the plain
model is an error, as is one whose library can't be imported.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adoption.check import alternating_blocks
from adoption.models import autocasting
from benchmarks import command, report
from benchmarks.command import Record
from measure.comparison import AGAIN, TORCH, cycle_times
from measure.statistics import LEAST_SAMPLES, paired_ratio, spread
from ops import adopt

ADOPTED, ADOPTED_PLAIN, LIGER, LIGER_PLAIN = "adopted", "adopted, plain loss", "Liger", "Liger, plain loss"
OWN_ROTARY, OWN_MLP, BY_HAND = "adopted, own rotary", "adopted, own MLP", "by hand"
COMPILED, ADOPTED_COMPILED, BY_HAND_COMPILED = "compiled", "adopted, compiled", "by hand, compiled"
ARMS = (TORCH, AGAIN, ADOPTED, ADOPTED_PLAIN, OWN_ROTARY, OWN_MLP, LIGER, LIGER_PLAIN, COMPILED, ADOPTED_COMPILED)
DIT_ARMS = (TORCH, AGAIN, ADOPTED, BY_HAND, COMPILED, ADOPTED_COMPILED, BY_HAND_COMPILED)
SAME = 0.02  # of the loss and the gradient's norm, relative: rounding to bf16 stays below
WARM_UP = 3  # steps of each arm
_WIDE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "tie_word_embeddings": True}
SIZES: dict[str, dict[str, Any]] = {  # of transformers' models, about 110M parameters each
    "Llama": _WIDE | {"num_attention_heads": 12, "num_key_value_heads": 12},
    "Qwen3": _WIDE | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128},
    "Gemma3": _WIDE
    | {"hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
}
TINY = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}  # on the CPU
DITS = {  # tokens, channels, width, heads, blocks
    "DiT-B/2": (256, 16, 768, 12, 12),
    "DiT-XL/2, 8 blocks": (1024, 16, 1152, 16, 8),
}
SAMPLES = 64


class Task(NamedTuple):
    """What the arms train."""

    plain: nn.Module
    loss: Callable[[nn.Module], Tensor]  # of one batch
    facts: Record  # of all its records
    arms: Sequence[str]
    modeling: Any  # the module that the model is from
    by_hand: Callable[[], nn.Module] | None = None  # the same model, with the sites written into it
    steps: int = 2  # of a block that count

    @property
    def device(self) -> torch.device:
        return next(self.plain.parameters()).device


def of_transformers(kind: str, device: torch.device) -> Task:
    vocabulary, shape, sizes = (32768, (24, 1024), {}) if device.type == "cuda" else (256, (2, 32), TINY)
    modeling: Any = import_module(f"transformers.models.{kind.lower()}.modeling_{kind.lower()}")
    config = getattr(modeling, {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config"))
    config = config(**SIZES[kind] | sizes | {"vocab_size": vocabulary, "pad_token_id": 0})
    plain = getattr(modeling, f"{kind}ForCausalLM")(config).to(device, torch.float32).train()
    tokens = torch.randint(vocabulary, shape, device=device)

    def loss(model: nn.Module) -> Tensor:
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return Task(plain, loss, {"model": kind, "vocabulary": vocabulary, "tokens": tokens.numel()}, ARMS, modeling)


def of_dit(kind: str, device: torch.device) -> Task:
    modeling: Any = import_module("examples.dit_block")  # by name, as examples import from here
    sizes, samples = (DITS[kind], SAMPLES) if device.type == "cuda" else (modeling.TINY, 2)
    tokens, channels, width, *_ = sizes
    plain = modeling.DiT(*sizes).to(device)
    latents, noise = (torch.randn(samples, tokens, channels, device=device) for _ in range(2))
    condition = torch.randn(samples, width, device=device)

    def loss(model: nn.Module) -> Tensor:
        return model(latents, condition, noise)[1]

    facts = {"model": kind, "tokens": samples * tokens}
    return Task(plain, loss, facts, DIT_ARMS, modeling, partial(modeling.FusedDiT, *sizes), steps=1)


MODELS = dict.fromkeys(SIZES, of_transformers) | dict.fromkeys(DITS, of_dit)


class Arm:
    """A model that is trained, and the rotary function that its attention finds in its module, where Liger puts its own."""

    def __init__(self, name: str, task: Task) -> None:
        self.loss, self.device, self.module = task.loss, task.device, vars(task.modeling)
        self.model: Any = copy.deepcopy(task.plain)
        before = dict(self.module)
        if "Liger" in name:
            kind = task.facts["model"]
            suffix = {"Gemma3": "gemma3_text"}.get(kind, kind.lower())
            apply = getattr(import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{suffix}")
            apply(model=self.model, fused_linear_cross_entropy=name == LIGER)
        self.rotary = {key: of for key, of in self.module.items() if key == "apply_rotary_pos_emb"}
        self.module.update(before)
        if "by hand" in name and task.by_hand:
            self.model = task.by_hand().to(self.device)
            self.model.load_state_dict(task.plain.state_dict())
        if "adopted" in name:
            adopt(self.model, rotary=name != OWN_ROTARY, mlp=name != OWN_MLP, loss=name != ADOPTED_PLAIN, verbose=False)
        if "compiled" in name:
            self.model.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def backward(self) -> Tensor:
        self.module.update(self.rotary)
        with autocasting(self.device, torch.bfloat16 if self.device.type == "cuda" else None):
            loss = self.loss(self.model)
        loss.backward()
        return loss

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def first_steps(self) -> Record:
        """Loss, norm of the gradient, and on a GPU the memory that a step takes beside what stays."""
        found: Record = {"loss": self.backward().item()}
        found["gradient"] = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()]).item()
        self.optimizer.step()  # makes its state
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step()
            found["peak_gb"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
        for _ in range(WARM_UP):
            self.step()
        return found


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser("adoption.benchmark", __doc__, rounds=LEAST_SAMPLES)
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="(all)")
    return command.parse(parser, argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of(argv)
    results = command.open_results(options)
    for kind in options.model:
        torch.manual_seed(0)
        results.add(measure(MODELS[kind](kind, options.device), options.rounds))
    print(report.adoption({"records": results.finish()}))


def measure(task: Task, rounds: int) -> list[Record]:
    """A record for each arm, with its speed-up over each other; or with an error, which is printed."""
    cell = task.facts | {"parameters": sum(p.numel() for p in task.plain.parameters()), "weights": "fp32"}
    records: dict[str, Record] = {name: cell | {"arm": name} for name in task.arms}
    arms: dict[str, Arm] = {}
    before = dict(vars(task.modeling))
    torch.compiler.reset()  # else the sizes of the model before make these dynamic
    try:
        for name, record in records.items():
            vars(task.modeling).update(before)  # an arm of Liger has put its own there
            try:
                arm = Arm(name, task)
                record |= arm.first_steps()
                check(record, records[TORCH])
                arms[name] = arm
            except Exception as error:  # of somebody's library: the others are measured
                record["error"] = f"{type(error).__name__}: {error}"
                print(f"failed: {name}: {record['error']}", flush=True)
        blocks = alternating_blocks({name: arm.step for name, arm in arms.items()}, task.device, rounds, task.steps)
    finally:
        vars(task.modeling).update(before)
    cycles = {name: cycle_times(blocks[name]) for name in arms}
    for name, ms in cycles.items():
        times = spread(ms)
        records[name] |= {"ms": round(times.median, 3), "p10": round(times.p10, 3), "p90": round(times.p90, 3)}
        ratios = {base: paired_ratio(base_ms, ms) for base, base_ms in cycles.items() if base != name}
        records[name] |= {f"over {base}": [round(value, 4) for value in astuple(of)] for base, of in ratios.items()}
    return list(records.values())


def check(record: Record, plain: Record) -> None:
    """Raises ArithmeticError if an arm has another first loss or gradient than the plain model."""
    for what in ("loss", "gradient"):
        if not abs(record[what] - plain[what]) < SAME * plain[what]:
            raise ArithmeticError(f"its first {what} is {record[what]:.5g}, expected {plain[what]:.5g}")


if __name__ == "__main__":
    main()
