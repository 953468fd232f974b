"""The bytes that a mode must send, from the sizes alone: what the counted bytes are compared with."""

from __future__ import annotations

from h3core.config import H3Config
from h3core.packing import PackedSequence
from h3core.partition import Partition


def expected_bytes(
    mode: str,
    config: H3Config,
    sequence: PackedSequence,
    world: int,
    rank: int,
    evaluations: int,
    *,
    itemsize: int,
    reduce_itemsize: int | None = None,
) -> dict[str, int]:
    """Bytes that `rank` hands over per phase, over all blocks and evaluations, and once for the latents.

    S rows of which it holds S_r, H heads of which it holds H_r, head width d, hidden h, b bytes an element:
    - ulysses: qkv 3 S_r d b (H - H_r), out (S - S_r) H_r d b;
    - tensor: each gather S_r h b (P - 1), each reduce-scatter (S - S_r) h b', b' being that of the partials.
    """
    plan = Partition.build(config, sequence.rows, world)
    rows, heads = plan.rows[rank], plan.heads[rank]
    width, hidden = config.attention_head_dim, config.hidden_size
    others = sequence.rows - rows.size
    calls = config.num_layers * evaluations
    if mode == "ulysses":
        block = {
            "qkv": 3 * rows.size * width * itemsize * (config.num_attention_heads - heads.size),
            "out": others * heads.size * width * itemsize,
        }
    else:
        gather = rows.size * hidden * itemsize * (world - 1)
        reduce = others * hidden * (reduce_itemsize or itemsize)
        block = {"attn_gather": gather, "attn_reduce": reduce, "mlp_gather": gather, "mlp_reduce": reduce}
    phases = {phase: count * calls for phase, count in block.items()}
    own_values = (
        sequence.video.clip(rows).size * config.video_row_dim
        + sequence.audio.clip(rows).size * config.audio_in_channels
    )
    phases["latents"] = own_values * max(4, itemsize) * (world - 1)
    return phases
