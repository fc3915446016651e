"""The training step of an arm, captured once and used for all its runs.

A run is `train.py`'s: the same weights, batches, rates, dropout seeds and optimizer. They enter through tensors that stay where
they are: a run begins by filling them, and a CUDA graph of the whole step (forward, backward, clipping, optimizer) is replayed
from there. The graph counts the steps itself. On a CPU the same function is called without a graph.

The optimizer's state has to be tensors that begin as zeros, on a GPU there: those of AdamW and Muon are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from configs import Config, ConfigError
from data import Batches, Corpus, ValidationWindows
from measure.timing import describe
from model import GPT
from train import learning_rate
from training import export
from training.build import build
from training.step import MixedPrecision, seed_micro_batch

WARM_UP = 3  # steps before the capture: kernels are compiled and memory is reserved

Fill = Callable[[GPT], object]


class Engine:
    """An arm's model and optimizer, and what they read and write.

    Args:
        cfg: of any of the arm's runs: they differ in learning rate and seed.
        corpus: the validation windows are those of `train.py`.
        fill: of the arm, see `study.arms.Arm`.

    Raises:
        ConfigError: on a GPU, a step that can't be captured.
    """

    def __init__(self, cfg: Config, precision: MixedPrecision, corpus: Corpus, fill: Fill = lambda model: None) -> None:
        self.cfg, self.precision, self.corpus, self.fill = cfg, precision, corpus, fill
        device, train = precision.device, cfg.train
        self.model, state, self.forward = build(cfg, precision, corpus.tokenizer.vocab_size, fill=fill)
        self.optimizer, self.on_gpu = state.optimizer, device.type == "cuda"
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

        self.windows = torch.zeros(train.steps, train.batch_size, cfg.model.context + 1, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(train.steps, train.accumulation, self.model.dropout_sites, dtype=torch.int64, device=device)
        self.rates = torch.zeros(train.steps, dtype=torch.float32 if self.on_gpu else torch.float64, device=device)
        self.losses, self.grad_norms = (torch.zeros(train.steps, device=device) for _ in range(2))
        self.initial: list[Tensor] = []  # weights of the seed
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # the step
        self.step = 0  # the same for the host
        for group in self.optimizer.param_groups:
            group["capturable"] = self.on_gpu  # PyTorch's optimizers refuse a capture without it

        batch = train.batch_size // train.accumulation
        windows = ValidationWindows(corpus.val.tokens, context=cfg.model.context, batch_size=batch, batches=cfg.eval.batches)
        self.val = [torch.stack(pair).to(device) for pair in windows]  # each [2, rows, context]; the last may have fewer rows
        self.val_batch, self.val_total = self.val[0].clone(), torch.zeros((), device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._val_graph: torch.cuda.CUDAGraph | None = None
        if self.on_gpu:
            self._graph = self._captured(self._train)
            self.model.eval()
            self._val_graph = self._captured(lambda: self._validate(self.val_batch))
            self.model.train()

    # ---- a run -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, cfg: Config) -> None:
        """Makes this the run of cfg, before its first step."""
        steps, micro_batches, sites = self.seeds.shape
        if cfg.seed != self.cfg.seed or not self.initial:
            self.initial = self._initial_values(cfg)
            self.windows.copy_(windows_of(cfg, self.corpus))
            drawn = [seed_micro_batch(cfg.seed, step, part, 0, sites, self.precision.device)
                     for step in range(steps) for part in range(micro_batches)]  # fmt: skip
            self.seeds.copy_(torch.stack(drawn).view_as(self.seeds))
        self.rates.copy_(torch.tensor([learning_rate(step, steps, cfg.optim) for step in range(steps)], dtype=torch.float64))
        self.cfg = cfg
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Back to before the first step of the run."""
        torch._foreach_copy_(list(self.model.parameters()), self.initial)
        for state in self.optimizer.state.values():
            for value in state.values():  # a graph holds the addresses
                value.zero_()
        self.at.zero_()
        self.step = 0

    def _initial_values(self, cfg: Config) -> list[Tensor]:
        """The weights that `train.py` begins with, and what `fill` makes of them."""

        def filled(model: GPT) -> None:
            if cfg.init_from:
                export.load(model, cfg.init_from, self.corpus.tokenizer)
            self.fill(model)

        model = build(cfg, self.precision, self.corpus.tokenizer.vocab_size, fill=filled).model
        return [parameter.detach() for parameter in model.parameters()]

    def advance(self, steps: int) -> None:
        """Takes training steps. On a GPU it returns before they are done."""
        for _ in range(steps):
            if self._graph is None:
                self._train()
            else:
                # a graph reads the generator's seed when it is replayed
                seed_micro_batch(self.cfg.seed, self.step, 0, 0, self.seeds.shape[2], self.precision.device)
                self._graph.replay()
            self.step += 1

    @torch.no_grad()
    def evaluate(self, most: int | None = None) -> float:
        """The mean validation loss, as `training.metrics.evaluate` computes it; of at most so many batches."""
        self.model.eval()
        self.val_total.zero_()
        val = self.val[:most]
        for batch in val:
            if self._val_graph is None or batch.shape != self.val_batch.shape:
                self._validate(batch)
            else:
                self.val_batch.copy_(batch)
                self._val_graph.replay()
        self.model.train()
        return self.val_total.item() / sum(batch[1].numel() for batch in val)

    # ---- what is captured ------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        rows = self.windows.index_select(0, self.at)[0].long()
        parts = self.seeds.shape[1]
        inputs, targets = (part.contiguous().chunk(parts) for part in (rows[:, :-1], rows[:, 1:]))
        seeds = self.seeds.index_select(0, self.at)[0]
        rate: Any = self.rates.index_select(0, self.at)[0]
        for group in self.optimizer.param_groups:
            group["lr"] = rate if self.on_gpu else rate.item()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros_like(self.val_total)
        for part, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            if not self.on_gpu:
                seed_micro_batch(self.cfg.seed, self.step, part, 0, self.seeds.shape[2], self.precision.device)
            with self.precision.autocast():
                loss = self.forward(x, y, seeds=seeds[part])
            loss = loss / parts
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.cfg.optim.clip_norm or float("inf"))
        self.optimizer.step()
        self.losses.index_copy_(0, self.at, total[None])
        self.grad_norms.index_copy_(0, self.at, norm.detach()[None])
        self.at += 1

    @torch.no_grad()
    def _validate(self, batch: Tensor) -> None:
        inputs, targets = batch
        with self.precision.autocast():
            self.val_total += self.model(inputs, targets) * targets.numel()

    def _captured(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
                self.at.zero_()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, stream=stream):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            remedy = "`python train.py -m` with the same keys makes the runs without a graph."
            raise ConfigError(f"this step can't be captured in a CUDA graph: {describe(error)}. {remedy}") from error
        return graph


def windows_of(cfg: Config, corpus: Corpus) -> Tensor:
    """All batches of a run: int32 [steps, rows, context + 1]."""
    batches = Batches(corpus.train.tokens, context=cfg.model.context, batch_size=cfg.train.batch_size, seed=cfg.seed)
    pairs = (batches[step] for step in range(cfg.train.steps))
    return torch.stack([torch.cat([inputs, targets[:, -1:]], dim=1).int() for inputs, targets in pairs])
