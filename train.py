"""Trains a GPT: config → data → model → step → log, in that order.

python train.py                                    Shakespeare on a CPU, under 3 minutes
python train.py norm.impl=torch model=gpt2 ...     `python train.py --help` lists groups and keys
torchrun --nproc-per-node=8 train.py model=gpt2    the same on eight GPUs
"""

import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds: Ctrl-C during them prints no traceback

import hydra
import torch
from omegaconf import DictConfig

from configs import Config, as_config_errors, keys, rules
from configs.machine import Machine
from configs.schema import Precision
from data import Batches, load_corpus
from measure.clock import StepClock
from training import export
from training.build import build
from training.checkpoint import Saver
from training.command import start
from training.distributed import ALONE, World
from training.inputs import Inputs
from training.interrupt import Interrupt, Stopped
from training.metrics import Metrics, quantities
from training.precision import MixedPrecision
from training.profile import UNTIMED, profiled
from training.run import Run, Summary
from training.sharding import is_sharded
from training.start import facts, job
from training.step import WARM_UP, TrainingStep
from training.text import continue_text, encode_prompt


def train(cfg: Config, run: Run, machine: Machine, world: World = ALONE) -> Summary:
    """Makes one run, from a checked config to its last checkpoint. Every rank of the run calls it.

    Raises:
        ConfigError: the data or the model refuse what the config asks for; nothing has been trained.
        NonFiniteError: the loss, the gradient or a weight became NaN or infinite; the last good checkpoint stays.
        StorageError: a checkpoint or a line of metrics can't be written; the last good checkpoint stays.
        SystemExit: Ctrl-C (130), SIGTERM (143), SIGHUP (129) or SIGUSR1 (138), after a checkpoint.
    """
    # ---- data --------------------------------------------------------------------------------------------------------------
    precision = MixedPrecision.of(cfg.train.precision, machine)
    cfg.train.precision = Precision(str(precision))  # config.yaml says what `auto` became, so that a resumed run keeps it
    with world.shared_errors(), as_config_errors():
        corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
        batches = Batches(
            corpus.train.tokens,
            context=cfg.model.context,
            batch_size=cfg.train.batch_size,
            seed=cfg.seed,
            rank=world.rank,
            ranks=world.size,
            order=run.origin.order,
        )
        # before training, so that a prompt that can't be encoded costs nothing
        prompt = encode_prompt(corpus.tokenizer, cfg.sample.prompt) if cfg.sample.tokens else []

    # ---- model -------------------------------------------------------------------------------------------------------------
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # PyTorch limits recompilations, and counts those of earlier runs of a sweep
    stored = run.origin.stored
    model, state, forward = build(
        cfg,
        precision,
        corpus.tokenizer.vocab_size,
        world,
        fill=lambda model: None if stored or not cfg.init_from else export.load(model, cfg.init_from, corpus.tokenizer),
        restore=lambda state: state.restore(stored, same_folder=run.origin.in_place) if stored else None,
        tokenizer=corpus.tokenizer.to_json(),
        corpus=corpus.identity,
    )

    # ---- step → log --------------------------------------------------------------------------------------------------------
    no_graph = rules.why_no_graph(cfg, machine)
    with world.shared_errors():
        sizes = quantities(cfg, corpus, model)
        run.start(facts(run.origin, precision, corpus, sizes, no_graph, world), sizes, corpus.tokenizer)
    clock = StepClock(precision.device, warmup=UNTIMED if cfg.profile else WARM_UP + (not no_graph))  # and the capture
    metrics = Metrics(state, cfg, corpus, precision, clock, world, run.log)
    inputs = Inputs(batches, cfg, model.dropout_sites, precision.device)
    how: dict[str, Any] = {"graph": not no_graph, "record": metrics.record, "evaluation": metrics.evaluation, "say": run.say}
    training_step = TrainingStep(forward, state, inputs, cfg, precision, world, **how)  # forward, backward, clip, optimizer
    saver = Saver(run.folder, cfg, world)
    with Interrupt(world) as interrupt:
        if state.owes_validation:
            metrics.validate(interrupt.check)
        steps = range(state.step, cfg.train.steps)
        for step in run.progress(profiled(run, steps) if cfg.profile else steps):
            with clock.step():
                training_step(step)
            state.step = done = step + 1
            metrics.add()

            last = done == cfg.train.steps
            if last or due(done, cfg.logging.every):
                metrics.line()
            if last or due(done, cfg.eval.every):
                with suppress(Stopped):  # the poll below sees the signal too
                    metrics.validate(interrupt.check)
            stopping, overdue = interrupt.poll(saver.overdue)  # one message between the ranks
            if last or stopping or overdue or due(done, cfg.checkpoint.every) or state.best_step == done:
                with clock.paused():
                    metrics.flush()
                    metrics.health.check_weights(model, done)
                    saver.save(state)
            if stopping:
                raise Stopped(128 + stopping)

        # ---- results -------------------------------------------------------------------------------------------------------
        assert state.validation is not None and state.best is not None  # the last step was evaluated
        text, sharded = "", is_sharded(model)
        if prompt and (world.leads or sharded):
            # the ranks of a sharded model gather weights together, in the dtype of autocast
            with precision.autocast() if sharded else nullcontext():
                [text] = continue_text(model, corpus.tokenizer, prompt, cfg.sample, cfg.seed, precision.device)
        summary = Summary(run.folder, state.validation, state.best, clock.median_ms, text)
        return run.finish(summary, {"tokens": state.tokens} | sizes)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@hydra.main(config_path="configs", config_name="train", version_base=None)
def task(composed: DictConfig) -> float | None:
    """The validation loss of one run, which a sweeper may minimise."""
    return job(train, composed)


def main(arguments: Sequence[str] | None = None) -> int:
    return start(task, Config, keys.help_text, arguments)


if __name__ == "__main__":
    sys.exit(main())
