"""Row-invariance: does row i of an M-row call equal row i of the whole call, to the bit?

Where it holds, ulysses over ranks equals one rank bit for bit; where it does not, the operation that breaks
it is known by name. The probe runs at the tier's own shapes: for every operation, each rank's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from h3core.attention import attention_backend
from h3core.config import H3Config
from h3core.layers import modulate, rms_norm, rotary_tables, rotate, swiglu
from h3core.linear import blocked, dense
from h3core.partition import Span
from h3core.weights import Affine


@dataclass(frozen=True, slots=True)
class Invariance:
    """One operation's result: the row counts tried, and those at which some row came out otherwise."""

    operation: str
    tried: tuple[int, ...]
    broken: tuple[int, ...]

    def merged(self, other: Invariance) -> Invariance:
        """Both results of one operation, tried at more sizes."""
        return Invariance(
            self.operation,
            tuple(sorted({*self.tried, *other.tried})),
            tuple(sorted({*self.broken, *other.broken})),
        )

    def describe(self) -> str:
        """One line of the table."""
        found = f"NOT EQUAL at M = {', '.join(map(str, self.broken))}" if self.broken else "equal"
        return f"{self.operation:22} {found:10} at {len(self.tried)} sizes, {self.tried[0]} to {self.tried[-1]}"


def probe(
    config: H3Config,
    rows: int,
    parts: Iterable[tuple[Span, ...]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "sdpa",
    seed: int = 0,
) -> list[Invariance]:
    """Run each row-wise operation of a block on all `rows` rows and on every span of `parts`; compare bits.

    `parts` holds one tuple of row spans per world. Heads are probed the same way: attention by head ranges.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(like).to(device)

    def weight(out: int, inner: int, like: torch.dtype = dtype) -> Tensor:
        scaled: Tensor = draw(out, inner, like=torch.float32) / inner**0.5
        return scaled.to(like)

    hidden, inner, ffn, width = config.hidden_size, config.inner_dim, config.ffn_dim, config.attention_head_dim
    island = torch.promote_types(dtype, torch.float32)
    scale, shift = draw(hidden), draw(hidden)
    norm, head_norm = draw(hidden), draw(width)
    cos, sin = rotary_tables(draw(rows, 3, like=torch.float32) * 100, draw(config.rope_freq_dim, like=torch.float32))
    qkv, out = weight(3 * inner, hidden), weight(hidden, inner)
    fc1, fc2 = weight(2 * ffn, hidden), weight(hidden, ffn)
    islands = {
        name: Affine(weight(o, i, island), draw(o, like=island))
        for name, o, i in (
            ("video_in", hidden, config.video_row_dim),
            ("audio_in", hidden, config.audio_in_channels),
            ("video_out", config.video_row_dim, hidden),
            ("audio_out", config.audio_in_channels, hidden),
        )
    }
    x, wide, tall = draw(rows, hidden), draw(rows, inner), draw(rows, ffn)
    heads = draw(rows, 4, width)

    Operation = Callable[[slice], Tensor]
    operations: dict[str, Operation] = {
        "qkv": lambda s: dense(x[s], qkv),
        "attention out": lambda s: dense(wide[s], out),
        "fc1": lambda s: dense(x[s], fc1),
        "fc2": lambda s: dense(tall[s], fc2),
        "swiglu": lambda s: swiglu(torch.cat([tall[s], tall[s]], dim=-1)),
        "modulated norm": lambda s: modulate(rms_norm(x[s], norm, config.norm_eps), scale, shift),
        "QK-norm and RoPE": lambda s: rotate(rms_norm(heads[s], head_norm, config.qk_norm_eps), cos[s], sin[s]),
    }
    for name, affine in islands.items():
        data = draw(rows, affine.weight.shape[1], like=island)
        operations[name] = lambda s, data=data, affine=affine: blocked(data[s], affine)  # type: ignore[misc]

    spans = sorted({span for world in parts for span in world})
    results = []
    for name, operation in operations.items():
        whole = operation(slice(0, rows))
        broken = {
            span.size for span in spans if not torch.equal(operation(slice(*span)), whole[span.start : span.stop])
        }
        results.append(Invariance(name, tuple(sorted({span.size for span in spans})), tuple(sorted(broken))))
    results.append(_heads(config, rows, attention, draw))
    return results


def _heads(config: H3Config, rows: int, attention: str, draw: Callable[..., Tensor]) -> Invariance:
    """Attention of some heads against the same heads of the whole call."""
    attend = attention_backend(attention)
    q, k, v = (draw(rows, config.num_attention_heads, config.attention_head_dim) for _ in range(3))
    whole = attend(q, k, v)
    sizes, broken = set(), set()
    for count in range(1, config.num_attention_heads):
        start = config.num_attention_heads - count
        sizes.add(count)
        if not torch.equal(attend(q[:, start:], k[:, start:], v[:, start:]), whole[:, start:]):
            broken.add(count)
    return Invariance("attention, by heads", tuple(sorted(sizes)), tuple(sorted(broken)))
