"""A GPT: from tokens to logits or loss."""

import math
from collections.abc import Callable, Sequence
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from configs.schema import (
    BlockLayout,
    DropoutMasks,
    EmbeddingScale,
    LossConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    NormImpl,
    Positions,
    ResidualDtype,
    ResidualScale,
    draws_from_torch,
)
from model.attention import Attention, rotary_table
from model.block import ParallelBlock, SequentialBlock, norm_site
from model.loss import next_token_loss, softcapped
from model.mlp import MLP
from model.sites import activation_dtype

COLDEST = 1e-30  # a lower temperature would sample the same, and logits divided by it overflow


class GPT(nn.Module):
    """A decoder-only transformer with the options of ModelConfig; NormConfig picks the operator at its norm sites.

    Two models that differ only in `norm` have the same parameter names and shapes, and the same initial values for the same
    torch seed. RMSNorm has no biases.

    Args:
        cfg: sizes and options.
        norm: implementation and kind of the norms.
        vocab_size: the tokenizer's; model.vocab_size may enlarge it.
        loss: implementation and options of the loss; its softcap caps all logits.
        mlp: implementation of the MLPs' activation.

    Raises:
        ValueError: model.vocab_size is smaller than the tokenizer's vocabulary. configs.rules checks the other options.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        norm: NormConfig,
        vocab_size: int,
        loss: LossConfig | None = None,
        mlp: MlpConfig | None = None,
    ) -> None:
        super().__init__()
        if cfg.vocab_size is not None and cfg.vocab_size < vocab_size:
            raise ValueError(
                f"model.vocab_size is {cfg.vocab_size}, less than the tokenizer's {vocab_size}. "
                f"Use {vocab_size} or more, or null to take it from the tokenizer."
            )
        self.cfg, self.norm, self.tokenizer_vocab_size = cfg, norm, vocab_size
        self.vocab_size = embedding_rows(cfg, vocab_size)
        self.loss = loss or LossConfig()

        self.embedding = nn.Embedding(self.vocab_size, cfg.width)
        self.positions, rotary = None, None
        match cfg.positions:
            case Positions.learned:
                self.positions = nn.Embedding(cfg.context, cfg.width)
            case Positions.rotary:
                rotary = rotary_table(cfg.context, cfg.width // cfg.heads, cfg.rotary_base)
            case _:
                assert_never(cfg.positions)
        self.rotary: Tensor | None
        self.register_buffer("rotary", rotary, persistent=False)

        last, Block = 2 * cfg.layers - 1, block_class(cfg.block)
        self.blocks = nn.ModuleList(Block(cfg, norm, layer, mlp) for layer in range(cfg.layers))
        adds = (last - 1, last) if Block is ParallelBlock else (last, None)
        self.final_norm = norm_site(cfg, norm, adds=adds, prenorm=False)
        self.head = None if cfg.tie_embeddings else nn.Linear(cfg.width, self.vocab_size, bias=False)

        self.sites_per_block = Block.sites
        self.dropout_sites = cfg.layers * Block.sites + 1  # and the final norm
        self.recompute = False  # train.recompute: backward computes each block again from its inputs
        self.initialize()

    def forward(self, tokens: Tensor, targets: Tensor | None = None, seeds: Tensor | None = None) -> Tensor:
        """Logits, or with targets the mean cross-entropy in nats.

        Args:
            tokens: [B, T] int64, T ≤ model.context.
            targets: [B, T] int64, the token that follows each; -100 where there is none to predict.
            seeds: [dropout_sites] int64 on the device of tokens, one seed of dropout masks per norm site. None: in training,
                torch's generator for that device draws them if they are needed.

        Returns:
            [B, T, vocab_size] in the dtype of the head's product (autocast's where it is on), or a scalar in fp32.

        Raises:
            ValueError: tokens, targets or seeds of another shape or dtype.
        """
        self._check_inputs(tokens, targets, seeds)
        site_seeds = self._site_seeds(tokens.device, seeds)
        rotary = None if self.rotary is None else self.rotary[:, : tokens.shape[1]]

        x, x1, residual = self.embed(tokens), None, None
        for layer, block in enumerate(self.blocks):
            first = layer * self.sites_per_block
            inputs = (x, x1, residual, rotary, site_seeds[first : first + self.sites_per_block])
            if self.recompute and self.training:
                # the same masks come from the same seeds, or from the state of torch's generator, which checkpoint restores
                draws = draws_from_torch(self.cfg, self.norm)
                x, x1, residual = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=draws)
            else:
                x, x1, residual = block(*inputs)
        return self.predict(x, x1, residual, site_seeds[-1], targets)

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, T] int64 -> [B, T, width]. Their dropout happens at the first norm site."""
        x = self.embedding(tokens)
        if self.cfg.embedding_scale is not None:
            x = x * math.sqrt(self.cfg.width)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        match self.cfg.residual_dtype:
            case ResidualDtype.fp32:
                return x
            case ResidualDtype.compute:
                return x.to(activation_dtype(x))  # autocast leaves embeddings in fp32
            case _:
                assert_never(self.cfg.residual_dtype)

    def predict(
        self, x: Tensor, x1: Tensor | None, residual: Tensor | None, seed: Tensor | None, targets: Tensor | None
    ) -> Tensor:
        """Logits, or with targets the loss, from what the last block returns."""
        hidden = self.final_norm(x, residual, x1=x1, seed=seed)
        weight = self.embedding.weight if self.head is None else self.head.weight
        if targets is None:
            return softcapped(F.linear(hidden, weight), self.loss.softcap)
        return next_token_loss(hidden.flatten(0, 1), weight, targets.flatten(), self.loss, self.training)

    @torch.no_grad()
    def initialize(self) -> None:
        """GPT-2's initialisation: normal(0, 0.02), and 1/√(2·layers) of it for the projections that feed the residual stream.

        With model.embedding_scale=unit the tokens' embeddings have 1/√width instead: tied, they are the head's weights too.
        With DeepNorm that of its paper (arXiv:2203.00555, table 2, decoder only): Xavier's normal distribution, with gain 1 for
        queries and keys and (8·layers)^-¼ for all else that feeds the stream. Norms start with ones and zeros and draw nothing,
        so that the draws are the same for every norm.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, weight in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                weight.mul_(1 / math.sqrt(2 * self.cfg.layers))
        match self.cfg.embedding_scale:
            case EmbeddingScale.unit:
                self.embedding.weight.mul_(1 / (0.02 * math.sqrt(self.cfg.width)))
            case EmbeddingScale.sqrt_width | None:
                pass
            case _:
                assert_never(self.cfg.embedding_scale)
        match self.cfg.residual_scale:
            case ResidualScale.deepnorm:
                gain, joined = (8 * self.cfg.layers) ** -0.25, self.joined()
                for name, weight in self.blocks.named_parameters():
                    if name.endswith("qkv.weight"):
                        for part, of_values in zip(weight.split(joined[weight]), (1.0, 1.0, gain), strict=True):
                            nn.init.xavier_normal_(part, of_values)
                    elif weight.ndim == 2:
                        nn.init.xavier_normal_(weight, gain)
            case None:
                pass
            case _:
                assert_never(self.cfg.residual_scale)

    def joined(self) -> dict[Tensor, list[int]]:
        """The parameters that are several matrices below each other, with the rows of each: queries, keys and values; the gate
        and the value of a SwiGLU."""
        found: dict[Tensor, list[int]] = {}
        for module in self.blocks.modules():
            if isinstance(module, Attention):
                found[module.qkv.weight] = module.rows
            elif isinstance(module, MLP):
                found[module.up.weight] = module.rows
        return found

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        seen: Callable[[Tensor], object] = lambda tokens: None,
    ) -> Tensor:
        """`tokens` [B, T] and `new_tokens` more, sampled one at a time: [B, T + new_tokens] int64.

        Args:
            tokens: the prompt, T ≥ 1; the model sees its last model.context tokens.
            new_tokens: how many to add.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: sample from the k likeliest tokens; None: from all.
            generator: of the device of tokens; None: torch's.
            seen: called after each new token with all tokens so far.

        Raises:
            ValueError: an empty prompt, a temperature that is negative or not finite, or a top_k below 1.
        """
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"generate: tokens has shape {tuple(tokens.shape)}, expected [B, T] with T of 1 or more")
        if not 0 <= temperature < math.inf:  # NaN fails here too
            raise ValueError(f"generate: temperature must be 0 (the likeliest token) or more and finite, got {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"generate: top_k must be 1 or more, or None for all tokens, got {top_k}")
        was_training = self.training
        self.eval()
        try:
            for _ in range(new_tokens):
                logits = self(tokens[:, -self.cfg.context :])[:, -1].float()
                logits = logits[:, : self.tokenizer_vocab_size]  # the rest is padding without a token
                if temperature == 0:
                    token = logits.argmax(dim=-1, keepdim=True)
                else:
                    if top_k is not None:
                        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                        logits = logits.masked_fill(logits < kth, -math.inf)
                    logits = logits / max(temperature, COLDEST)
                    token = torch.multinomial(F.softmax(logits, dim=-1), 1, generator=generator)
                tokens = torch.cat((tokens, token), dim=1)
                seen(tokens)
        finally:
            self.train(was_training)
        return tokens

    def parameter_count(self) -> int:
        """Trainable numbers, a tied embedding counted once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """Model FLOPs of forward and backward per token at full context: 6·N + 12·layers·width·context.

        As in PaLM (arXiv:2204.02311, appendix B): 2 FLOPs a multiply-add, backward twice forward, no rematerialisation, and
        causal attention counted as if it were full. N is the parameters that multiply activations: the linear layers and the
        head, be it tied or not; looking up embeddings costs nothing, norms and biases are left out. Grouped-query attention
        shrinks N through its projections, and leaves the second term: each query head still meets every position.
        """
        matrices = sum(m.weight.numel() for m in self.blocks.modules() if isinstance(m, nn.Linear))
        head = self.vocab_size * self.cfg.width
        return 6 * (matrices + head) + 12 * self.cfg.layers * self.cfg.width * self.cfg.context

    def _site_seeds(self, device: torch.device, seeds: Tensor | None) -> Sequence[Tensor | None]:
        seeded_masks = self.norm.impl == NormImpl.fused or self.norm.dropout_masks == DropoutMasks.shared
        needed = self.training and (self.cfg.drop_path > 0 or (self.cfg.dropout > 0 and seeded_masks))
        if not needed:
            return [None] * self.dropout_sites
        if seeds is None:
            seeds = torch.randint(-(2**63), 2**63 - 1, (self.dropout_sites,), device=device)
        # 16 bytes apart: a compiled graph copies an input that is not so aligned, in each backward one for each site.
        return torch.stack((seeds, seeds), dim=1)[:, 0].unbind()

    def _check_inputs(self, tokens: Tensor, targets: Tensor | None, seeds: Tensor | None) -> None:
        if tokens.ndim != 2 or tokens.dtype != torch.int64:
            raise ValueError(f"GPT: tokens has shape {tuple(tokens.shape)} and dtype {tokens.dtype}, expected [B, T] int64")
        if tokens.shape[1] > self.cfg.context:
            raise ValueError(
                f"GPT: tokens has {tokens.shape[1]} positions, and model.context is {self.cfg.context}. "
                "Shorten the sequences or raise model.context."
            )
        if targets is not None and (targets.shape != tokens.shape or targets.dtype != torch.int64):
            raise ValueError(
                f"GPT: targets has shape {tuple(targets.shape)} and dtype {targets.dtype}, "
                f"expected int64 of the shape of tokens, {tuple(tokens.shape)}"
            )
        if seeds is not None and (seeds.shape != (self.dropout_sites,) or seeds.dtype != torch.int64):
            raise ValueError(
                f"GPT: seeds has shape {tuple(seeds.shape)} and dtype {seeds.dtype}, "
                f"expected int64 of shape ({self.dropout_sites},): one for each norm site (model.dropout_sites)"
            )


def block_class(layout: BlockLayout) -> type[SequentialBlock] | type[ParallelBlock]:
    match layout:
        case BlockLayout.sequential:
            return SequentialBlock
        case BlockLayout.parallel:
            return ParallelBlock
        case _:
            assert_never(layout)


def embedding_rows(cfg: ModelConfig, vocab_size: int) -> int:
    """model.vocab_size, or its default. A multiple of 64 keeps the largest matrix product of a small model on the fast
    tensor-core path."""
    return cfg.vocab_size or -(-vocab_size // 64) * 64
