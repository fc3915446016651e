"""Trains a GPT: config → data → model → step → log, in that order.

python train.py                                    Shakespeare on a CPU, under 3 minutes
python train.py norm.impl=torch model=gpt2 ...     `python train.py --help` lists groups and keys
torchrun --nproc-per-node=8 train.py model=gpt2    the same on eight GPUs
"""

import signal
import sys
from collections.abc import Callable

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds: Ctrl-C during them prints no traceback

import torch

from configs import Config, command_line
from configs.machine import Machine
from configs.schema import LossImpl, Parallel
from data import Batches, load_corpus
from model import GPT
from training import pretrained
from training.checkpoint import Saver, TrainState
from training.clock import StepClock
from training.command import main
from training.distributed import ALONE, World, shard
from training.evaluation import Evaluator, encode_prompt, write_sample
from training.facts import Summary, facts, non_finite_explained
from training.interrupt import Interrupt
from training.metrics import Metrics
from training.precision import Precision
from training.profile import StepProfiler
from training.run import Run
from training.step import adamw, compile_model, training_step


def train(cfg: Config, run: Run, machine: Machine, world: World = ALONE) -> Summary:
    """Makes one run, from a checked config to its last checkpoint. Every rank of the run calls it.

    Raises:
        ConfigError: the data or the model refuse what the config asks for; nothing has been trained.
        NonFiniteError: the loss, the gradient or a weight became NaN or infinite; the last good checkpoint stays.
        StorageError: a checkpoint or a line of metrics can't be written; the last good checkpoint stays.
        SystemExit: Ctrl-C (130), SIGTERM (143), SIGHUP (129) or SIGUSR1 (138), after a checkpoint.
    """
    # ---- data --------------------------------------------------------------------------------------------------------------
    precision = Precision.settle(cfg.train.precision, machine)
    cfg.train.precision = precision.wanted  # config.yaml says what `auto` became, so that a resumed run keeps it
    with world.shared_errors(), command_line.as_config_errors():
        corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
        batches = Batches(
            corpus.train.tokens,
            context=cfg.model.context,
            batch_size=cfg.train.batch_size,
            seed=cfg.seed,
            rank=world.rank,
            ranks=world.size,
        )
        # before training, so that a prompt that can't be encoded costs nothing
        prompt = encode_prompt(corpus.tokenizer, cfg.sample.prompt) if cfg.sample.tokens else []

    # ---- model -------------------------------------------------------------------------------------------------------------
    torch.manual_seed(cfg.seed)  # the same initial weights for every norm.impl
    with world.shared_errors(), command_line.as_config_errors():
        model = GPT(cfg.model, cfg.norm, corpus.tokenizer.vocab_size, cfg.loss)
        if cfg.init_from is not None and not run.origin.stored:
            pretrained.load(model, cfg.init_from, corpus.tokenizer)
        model.recompute = cfg.train.recompute
    if cfg.train.compile or cfg.loss.impl is LossImpl.compiled:
        torch.compiler.reset()  # PyTorch limits recompilations, and counts those of earlier runs of a sweep
    sharded = cfg.parallel is Parallel.fsdp
    if sharded:
        shard(model, precision, world.size, compiled=cfg.train.compile)
    model = model.to(precision.device)
    state = TrainState(
        model, adamw(model, cfg.optim), precision.scaler(), corpus.tokenizer.to_json(), corpus.identity, leads=world.leads
    )
    if run.origin.stored:
        with world.shared_errors():
            state.restore(run.origin.stored, with_changes=cfg.resume_with_changes, same_folder=run.origin.in_place)
    forward: Callable[..., torch.Tensor] = model
    if cfg.train.compile and not sharded:
        forward = compile_model(model, cfg.train)
    forward = world.replicate(forward)

    # ---- step → log --------------------------------------------------------------------------------------------------------
    with world.shared_errors():
        run.start(facts(run.origin, precision, corpus, model, world), corpus)
    clock = StepClock(precision.device, gpu_time=True)
    metrics = Metrics(state, cfg, precision, clock, world)
    profiler = StepProfiler(cfg.profile and world.leads, run, clock, precision.device, None if cfg.train.compile else model)
    with non_finite_explained(run, batches), Interrupt(world) as interrupt, Saver(run.folder, cfg, world) as saver, profiler:
        evaluator = Evaluator(run, corpus.val, metrics, interrupt, world)
        evaluator.make_up()
        saver.update_links(state.best_step)  # the newest checkpoint of a resumed run may be damaged and out of use
        for step in run.progress(evaluator.steps_left()):
            with profiler.step():
                loss, grad_norm = training_step(forward, state, batches[step], step, cfg, precision, world)
            state.step = done = step + 1
            metrics.add(loss, grad_norm)

            last = done == cfg.train.steps
            if last or due(done, cfg.logging.every):
                run.log(done, metrics.line())
                run.say(metrics.advice())
            if last or due(done, cfg.eval.every):
                evaluator.evaluate()
            stopping, overdue = interrupt.poll(saver.overdue)  # one message between the ranks
            if last or stopping or overdue or due(done, cfg.checkpoint.every) or state.best_step == done:
                with clock.paused():
                    metrics.health.check_weights(model, done)
                    run.sync()
                    saver.save(state)
            if stopping:
                break

        # ---- results -------------------------------------------------------------------------------------------------------
        saver.wait()
        if state.owes_validation or state.step < cfg.train.steps:
            run.stop(state.step, interrupt)
        assert state.validation is not None and state.best is not None  # the last step was evaluated
        interrupt.answer = "Stopping."
        run.finish({"final": vars(state.validation), "best": vars(state.best), "median_step_ms": clock.median_ms})
        text = write_sample(run, model, corpus.tokenizer, prompt, precision, interrupt, world)
    return Summary(run.folder, state.validation, state.best, clock.median_ms, text)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


if __name__ == "__main__":
    sys.exit(main(train))
