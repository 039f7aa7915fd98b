"""What a decoder model is, whatever file it came from. Knows neither files nor kernels."""

from __future__ import annotations

from dataclasses import dataclass

from hopon.model.rope import Rope


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a model.

    Args:
        family: name of the page under ``families`` that builds its program.
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        ffn_size: width of the gated feed-forward.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides ``num_heads``.
        head_dim: values per head.
        vocab_size: rows of the embedding and of the head.
        norm_eps: epsilon of every RMSNorm.
        rope: rotary position embedding.
        context_length: longest sequence that the model is made for, in tokens.
        tied: the head is the embedding.
        qkv_bias: the q, k and v projections have biases.
        o_bias: the attention output projection has one.
        qk_norm: q and k heads are normed before they are rotated.
        eos_ids: every declared end-of-sequence token, ascending.
        bos_id: beginning-of-sequence token, where there is one.
        add_bos: whether a text prompt starts with it; None leaves that to the tokenizer's own file.

    Raises:
        ValueError: names the value and the limit.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: Rope
    context_length: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    add_bos: bool | None = None

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "ffn_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "context_length",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.rope.dim > self.head_dim:
            raise ValueError(f"rope dimension {self.rope.dim} must be at most head_dim {self.head_dim}")
        for token in self.eos_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"end-of-sequence token {token} must be in [0, {self.vocab_size})")

    @property
    def kv_size(self) -> int:
        """Values of K (or V) per token and layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights of the matrices; norms and biases left out."""
        layer = self.hidden_size * (2 * self.num_heads * self.head_dim + 2 * self.kv_size + 3 * self.ffn_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size * (1 if self.tied else 2)
