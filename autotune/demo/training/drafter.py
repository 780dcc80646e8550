"""The drafter: a few Llama layers that read the target's hidden states.

Module and parameter names are those of vLLM's `LlamaForCausalLMEagle3`, so `state_dict()` is
already the layout that vLLM loads. Shapes below: B samples, N slots, H hidden size, A auxiliary
layers of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.demo.training.spec import HeadSpec

if TYPE_CHECKING:
    from transformers import LlamaConfig


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter; whatever the head does not choose follows the target."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    num_layers: int
    num_aux_layers: int
    draft_vocab_size: int

    @classmethod
    def of(cls, spec: HeadSpec, config: LlamaConfig) -> DrafterShape:
        """Return the sizes of the head `spec` for a target with this configuration."""
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=float(dict(config.rope_parameters or {})["rope_theta"]),
            num_layers=spec.num_layers,
            num_aux_layers=len(spec.aux_layer_ids),
            draft_vocab_size=spec.draft_vocab_size,
        )


class RmsNorm(nn.Module):
    """Divide by the root mean square of the last dimension, then scale every channel."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """Return the normalised states, in the shape they came in."""
        # Not torch's rms_norm: it warns when states and weight differ in type, as under autocast.
        wide = states.float()
        scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).type_as(states)


def rotate(states: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply rotary position embedding the way Llama does, halves rotated against each other.

    Args:
        states: shape (B, heads, N, head_dim).
        positions: shape (B, N), token positions in the sequence.
        theta: base of the frequencies.
    """
    half = states.shape[-1] // 2
    frequencies = 1.0 / theta ** (torch.arange(half, dtype=torch.float32) / half)
    angles = positions[:, None, :, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = states[..., :half], states[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention of Llama, with an input width of its own."""

    def __init__(self, shape: DrafterShape, input_size: int) -> None:
        super().__init__()
        self.shape = shape
        query_size = shape.num_heads * shape.head_dim
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)

    def forward(self, states: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
        """Mix the slots.

        Args:
            states: shape (B, N, input size).
            positions: shape (B, N).
            allowed: shape (B, 1, N, N), true where the query (row) may see the key (column).

        Returns:
            Shape (B, N, H).
        """
        theta = self.shape.rope_theta
        query = rotate(self._split(self.q_proj(states)), positions, theta)
        key = rotate(self._split(self.k_proj(states)), positions, theta)
        value = self._split(self.v_proj(states))
        queries_per_key = self.shape.num_heads // self.shape.num_kv_heads
        mixed = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(queries_per_key, dim=1),
            value.repeat_interleave(queries_per_key, dim=1),
            attn_mask=allowed,
        )
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).flatten(start_dim=2)))

    def _split(self, states: Tensor) -> Tensor:
        """Turn (B, N, heads * head_dim) into (B, heads, N, head_dim)."""
        batch_size, num_slots, _ = states.shape
        return states.view(batch_size, num_slots, -1, self.shape.head_dim).transpose(1, 2)


class Mlp(nn.Module):
    """Llama's gated feed-forward block."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Return an update of the same shape."""
        gate = functional.silu(self.gate_proj(states))
        return cast(Tensor, self.down_proj(gate * self.up_proj(states)))


class DraftLayer(nn.Module):
    """One Llama layer; the first of a drafter also reads the token embeddings."""

    def __init__(self, shape: DrafterShape, *, is_first: bool) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.is_first = is_first
        self.self_attn = Attention(shape, 2 * size if is_first else size)
        self.mlp = Mlp(shape)
        self.input_layernorm = RmsNorm(size, eps)
        self.post_attention_layernorm = RmsNorm(size, eps)
        # Only the first layer calls it, but vLLM's class has one in every layer and wants a
        # weight for each. Elsewhere it gets no gradient and stays at ones.
        self.hidden_norm = RmsNorm(size, eps)

    def forward(
        self, embedded: Tensor, residual: Tensor, positions: Tensor, allowed: Tensor
    ) -> Tensor:
        """Return the residual stream after this layer, shape (B, N, H)."""
        if self.is_first:
            parts = [self.input_layernorm(embedded), self.hidden_norm(residual)]
            states = torch.cat(parts, dim=-1)
        else:
            states = self.input_layernorm(residual)
        residual = residual + self.self_attn(states, positions, allowed)
        return residual + cast(Tensor, self.mlp(self.post_attention_layernorm(residual)))


class Drafter(nn.Module):
    """A P-EAGLE head: all drafts of one step in one pass."""

    embedding: Tensor

    def __init__(self, shape: DrafterShape, embedding: Tensor) -> None:
        """Build a drafter with random weights; `autotune.demo.training.start` fills it.

        Args:
            shape: its sizes.
            embedding: the target's token embeddings, shape (target vocabulary, H).
        """
        super().__init__()
        layers = [DraftLayer(shape, is_first=i == 0) for i in range(shape.num_layers)]
        aux_size = shape.num_aux_layers * shape.hidden_size
        self.layers = nn.ModuleList(layers)
        self.fc = nn.Linear(aux_size, shape.hidden_size, bias=False)
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mask_hidden = nn.Parameter(torch.zeros(1, aux_size))
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        # The target's own output rows, frozen: they know the meaning of every token already, and
        # a head can so be trained on with another draft vocabulary (`start.start_from_head`).
        self.lm_head.requires_grad_(False)
        # A buffer, not a parameter, and not saved: vLLM lets the drafter share the target's
        # embedding. That holds for the mask token too, so its row must not be trained either;
        # what a mask slot learns goes into `mask_hidden`.
        self.register_buffer("embedding", embedding.detach(), persistent=False)

    def forward(
        self,
        token_ids: Tensor,
        features: Tensor,
        is_mask: Tensor,
        positions: Tensor,
        allowed: Tensor,
    ) -> Tensor:
        """Return the final hidden states, shape (B, N, H); `lm_head` turns them into logits.

        Args:
            token_ids: shape (B, N), the token *after* the position that `features` describe;
                the mask token in mask slots.
            features: shape (B, N, A * H), the target's auxiliary states; not read in mask slots.
            is_mask: shape (B, N), true in mask slots.
            positions: shape (B, N).
            allowed: shape (B, 1, N, N), see `Attention.forward`.
        """
        features = torch.where(is_mask[..., None], self.mask_hidden[0], features)
        residual: Tensor = self.fc(features)
        embedded = self.embedding[token_ids]
        for layer in self.layers:
            residual = layer(embedded, residual, positions, allowed)
        return cast(Tensor, self.norm(residual))
