"""What a model has learned: its loss on the validation set, and a sample of its text."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import chain, islice, repeat

import torch

from configs import ConfigError
from configs.schema import SampleConfig
from data import Split, Tokenizer, ValidationWindows
from model import GPT
from training.checkpoint import Validation
from training.distributed import ALONE, World, forward_only, is_sharded
from training.interrupt import Interrupt, Stopped
from training.metrics import Metrics
from training.precision import Precision
from training.run import Run
from training.storage import resume_command


class Evaluator:
    """Evaluates the model of a run, and keeps the last and the best validation in the state of training.

    A signal cuts an evaluation short. The state then says that it is owed, and the run makes up for it when it is resumed.
    """

    def __init__(self, run: Run, split: Split, metrics: Metrics, interrupt: Interrupt, world: World = ALONE) -> None:
        self._run, self._split, self._metrics, self._interrupt, self._world = run, split, metrics, interrupt, world
        self._state = metrics.state

    def make_up(self) -> None:
        """Makes the evaluation that a resumed run owes."""
        if self._state.owes_validation:
            self.evaluate()

    def steps_left(self) -> range:
        """The steps to train, counted from 0; none where a signal has cut the owed evaluation short again."""
        return range(self._state.step, self._state.step if self._state.owes_validation else self._run.cfg.train.steps)

    def evaluate(self) -> None:
        """Evaluates after the step that `state.step` counts. All ranks call it together.

        Raises:
            NonFiniteError: the training or the validation loss is NaN or infinite.
        """
        cfg, state, metrics, interrupt = self._run.cfg, self._state, self._metrics, self._interrupt
        state.owes_validation = True
        with metrics.clock.paused():
            metrics.health.check()
            with suppress(Stopped), interrupt.stopping_at_once("Leaving this evaluation for later, then a checkpoint."):
                # not the compiled model: it would be compiled again for evaluation, and for a last batch with fewer rows
                state.validation = evaluate(
                    state.model,
                    self._split,
                    metrics.precision,
                    context=cfg.model.context,
                    batch_size=cfg.train.batch_size // cfg.train.accumulation // self._world.size,
                    batches=cfg.eval.batches and cfg.eval.batches * self._world.size,
                    world=self._world,
                    before_batch=interrupt.check,
                )
                state.owes_validation = False
        if state.owes_validation:
            return
        validation = state.validation
        assert validation is not None
        metrics.health.check_validation(validation.loss, state.step)
        self._run.log(state.step, metrics.validation(validation))
        if state.best is None or validation.loss < state.best.loss:
            state.best, state.best_step = validation, state.step


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    split: Split,
    precision: Precision,
    *,
    context: int,
    batch_size: int,
    batches: int | None = None,
    world: World = ALONE,
    before_batch: Callable[[], None] = lambda: None,
) -> Validation:
    """The mean loss over every predicted token of `split`, the same on every rank. Draws no random numbers.

    Args:
        model: all ranks of a sharded model call this together.
        batch_size: rows of a batch. The ranks take batches in turn.
        batches: the number of batches to evaluate, of all ranks together; None: all. Their windows are spread evenly over the
            split. Both figures are then estimates: the loss of a sample, and bits per byte with the bytes per token of the
            whole split.
        before_batch: called before each batch, equally often on all ranks. An exception that it raises on all of them ends the
            evaluation.
    """
    was_training = model.training
    model.eval()
    total, tokens = torch.zeros((), device=precision.device), 0
    windows = ValidationWindows(
        split.tokens, context=context, batch_size=batch_size, batches=batches, rank=world.rank, ranks=world.size
    )
    most = world.max(len(windows))
    nothing = torch.zeros(1, context, dtype=torch.int64)
    try:
        with forward_only(model), precision.autocast():
            for batch in islice(chain(windows, repeat(None)), most):
                before_batch()
                if batch is not None:
                    inputs, targets = batch
                    loss = model(inputs.to(precision.device), targets.to(precision.device))
                    total += loss * targets.numel()  # the last batch may have fewer rows
                    tokens += targets.numel()
                elif is_sharded(model):  # its ranks gather weights together, so each makes as many passes as the busiest
                    model(nothing.to(precision.device))
        mean = world.sum(total).item() / int(world.sum(torch.tensor(tokens)))
    finally:  # a signal may cut it short
        model.train(was_training)
    return Validation(mean, split.bits_per_byte(mean))


def encode_prompt(tokenizer: Tokenizer, prompt: str, key: str = "sample.prompt") -> list[int]:
    """The token ids of a prompt. An empty one begins a document.

    Raises:
        ConfigError: the prompt, which the message calls `key`, can't be encoded, or has no token.
    """
    try:
        prompt.encode()  # bytes of a command line that are no UTF-8
        ids = tokenizer.encode(prompt) if prompt else tokenizer.separator
    except UnicodeEncodeError:
        raise ConfigError(f"{key}: is not UTF-8 text.") from None
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    if not ids:
        raise ConfigError(f"{key} has no tokens: the model needs one to go on from, such as a newline.")
    return ids


def continue_text(
    model: GPT,
    tokenizer: Tokenizer,
    ids: list[int],
    cfg: SampleConfig,
    seed: int,
    device: torch.device,
    samples: int = 1,
    seen: Callable[[list[str]], object] = lambda texts: None,
) -> list[str]:
    """Texts of `ids` and of cfg.tokens more; the same for the same seed. All ranks of a sharded model call it together.

    Ends of documents are shown as their token. `seen` is called with the texts so far after each token.
    """
    generator = torch.Generator(device).manual_seed(seed)
    begin = tokenizer.decode(ids, skip_special=False) if ids == tokenizer.separator else ""  # of a document: not shown

    def texts(tokens: torch.Tensor) -> list[str]:
        return [tokenizer.decode(row, skip_special=False).removeprefix(begin) for row in tokens.tolist()]

    with forward_only(model):
        prompt = torch.tensor([ids] * samples, device=device)
        tokens = model.generate(
            prompt, cfg.tokens, cfg.temperature, cfg.top_k, generator=generator, seen=lambda tokens: seen(texts(tokens))
        )
    return texts(tokens)


def write_sample(
    run: Run, model: GPT, tokenizer: Tokenizer, ids: list[int], precision: Precision, interrupt: Interrupt, world: World
) -> str:
    """Continues the prompt `ids` and keeps the text in the run's folder. Without a prompt there is no sample.

    All ranks call it together.

    Raises:
        Stopped: a signal came; the run makes up for the sample when it is resumed.
    """
    sharded, cfg, text = is_sharded(model), run.cfg, ""
    try:
        # the ranks of a sharded model gather weights together, in the dtype of autocast
        with interrupt.stopping_at_once(interrupt.answer), precision.autocast() if sharded else nullcontext():
            if ids and (world.leads or sharded):
                [text] = continue_text(model, tokenizer, ids, cfg.sample, cfg.seed, precision.device)
    except Stopped:
        missing = f" but the sample; to make it up: {resume_command(run.folder)}" if ids else ""
        run.say(f"stopped after the last step; all is kept{missing}")
        raise
    if ids:
        run.keep_sample(text)
    return text
