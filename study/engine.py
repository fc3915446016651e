"""A model and its step, built and captured once and used for all runs of an arm.

A run is `train.py`'s: the same weights, batches, rates, dropout seeds and optimizer. Weights and the optimizer's state stay
where they are, as the step's CUDA graph has their addresses; a run begins by filling them. The optimizer's state has to be
tensors that begin as zeros: those of AdamW and Muon are.
"""

from typing import Any

import torch
from torch import Tensor

from configs import rules
from configs.machine import Machine
from data import Batches, Corpus
from model import GPT
from study.config import Config
from training import export
from training.build import build
from training.evaluation import Evaluation
from training.inputs import Inputs
from training.precision import MixedPrecision
from training.step import TrainingStep


class Engine:
    """An arm's model, and a run of it.

    Args:
        cfg: of any of the arm's runs: they differ in learning rate and seed.
        corpus: the validation windows are those of `train.py`.
    """

    def __init__(self, cfg: Config, precision: MixedPrecision, corpus: Corpus) -> None:
        self.cfg, self.precision, self.corpus = cfg, precision, corpus
        device, train = precision.device, cfg.train
        self.model, self.state, forward = build(cfg, precision, corpus.tokenizer.vocab_size)
        self.initial: list[Tensor] = []  # weights of the seed
        self.step = 0
        self.losses, self.grad_norms = (torch.zeros(train.steps, device=device) for _ in range(2))
        rows = train.batch_size // train.accumulation
        self.evaluation = Evaluation(
            self.model, corpus.val, precision, context=cfg.model.context, batch_size=rows, batches=cfg.eval.batches
        )
        self.inputs = Inputs(self._batches(cfg), cfg, self.model.dropout_sites, device)
        graph = not rules.why_no_graph(cfg, Machine(device.type))
        how: dict[str, Any] = {"graph": graph, "record": self._record, "evaluation": self.evaluation}
        self.update = TrainingStep(forward, self.state, self.inputs, cfg, precision, **how)

    @torch.no_grad()
    def begin(self, cfg: Config) -> None:
        """Makes this the run of cfg, before its first step."""
        if cfg.seed != self.cfg.seed or not self.initial:
            self.initial = self._initial_values(cfg)
        self.inputs.begin(self._batches(cfg), cfg)
        self.cfg = cfg
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Back to before the first step of the run."""
        torch._foreach_copy_(list(self.model.parameters()), self.initial)
        for state in self.state.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.step = 0

    def advance(self, steps: int) -> None:
        """Takes training steps. On a GPU it returns before they are done."""
        for _ in range(steps):
            self.update(self.step)
            self.step += 1

    def _record(self, number: Tensor, loss: Tensor, grad_norm: Tensor) -> None:
        self.losses.index_copy_(0, number, loss[None])
        self.grad_norms.index_copy_(0, number, grad_norm[None])

    def _batches(self, cfg: Config) -> Batches:
        return Batches(self.corpus.train.tokens, context=cfg.model.context, batch_size=cfg.train.batch_size, seed=cfg.seed)

    def _initial_values(self, cfg: Config) -> list[Tensor]:
        """The weights that `train.py` begins with."""

        def fill(model: GPT) -> None:
            if cfg.init_from:
                export.load(model, cfg.init_from, self.corpus.tokenizer)

        model = build(cfg, self.precision, self.corpus.tokenizer.vocab_size, fill=fill).model
        return [parameter.detach() for parameter in model.parameters()]
