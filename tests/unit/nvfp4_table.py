"""NVFP4 written out by hand, and read by numpy: the oracle that shares no code with h3core or comfy-kitchen."""

from __future__ import annotations

import numpy as np
import torch

from h3core.nvfp4 import NVFP4Weight
from h3core.qualify.checks.compare import Identical, compare

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

# Scale bytes of E4M3 and what they stand for: sign, four exponent bits (bias 7), three of mantissa.
E4M3 = {0x38: 1.0, 0x3C: 1.5, 0x40: 2.0, 0x30: 0.5, 0x44: 3.0, 0x7E: 448.0, 0x01: 2.0**-9, 0x08: 2.0**-6}

# Where the scale of (row, block of 16 columns) of one 128 x 64 tile lies among its 512 bytes.
PLACES = {(0, 0): 0, (0, 1): 1, (0, 3): 3, (1, 0): 16, (31, 0): 496, (32, 0): 4, (32, 2): 6, (64, 0): 8, (127, 3): 511}

# Bytes of two codes, the high nibble being the even column: byte, even value, odd value.
PAIRS = [
    (0x12, 0.5, 1.0),
    (0x21, 1.0, 0.5),
    (0x37, 1.5, 6.0),
    (0x9A, -0.5, -1.0),
    (0xF0, -6.0, 0.0),
    (0x4C, 2.0, -2.0),
    (0x56, 3.0, 4.0),
    (0xDE, -3.0, -4.0),
]


def hand_table() -> tuple[NVFP4Weight, torch.Tensor]:
    """One 128 x 64 tile: codes and scales placed byte by byte, and the values (128, 64) that they stand for."""
    codes = np.tile(np.array([byte for byte, _, _ in PAIRS], dtype=np.uint8), (128, 4))
    values = np.tile(np.array([v for _, even, odd in PAIRS for v in (even, odd)]), (128, 4))
    scales = np.full(512, 0x38, dtype=np.uint8)
    factor = np.ones((128, 4))
    for (place, offset), byte in zip(PLACES.items(), [*E4M3, 0x3C], strict=True):
        scales[offset] = byte
        factor[place] = E4M3[byte]
    weight = NVFP4Weight(
        torch.from_numpy(codes),
        torch.from_numpy(scales).view(128, 4).view(torch.float8_e4m3fn),
        torch.tensor(0.25),
    )
    return weight, torch.from_numpy(values * factor.repeat(16, axis=1) * 0.25).float()


def check_hand_table() -> None:
    """Raise `ComparisonError` where h3core reads the hand-written tile otherwise."""
    weight, expected = hand_table()
    compare("hand-written NVFP4 tile", weight.dequantize(torch.float32), expected, Identical())


def random_weight(rows: int, cols: int, seed: int) -> NVFP4Weight:
    """Random codes, positive scales within two octaves, a scale_2 that is no power of two."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, cols // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0x30, 0x48, (rows, cols // 16), generator=generator, dtype=torch.uint8)
    return NVFP4Weight(codes, scales.view(torch.float8_e4m3fn), torch.tensor(0.0123 + seed * 1e-4))


def read_by_numpy(weight: NVFP4Weight) -> torch.Tensor:
    """The fp32 values by the written formula: code * (scale * scale_2), each product rounded to fp32."""
    rows, cols = weight.shape
    packed = weight.codes.numpy()
    nibbles = np.empty((rows, cols), dtype=np.uint8)
    nibbles[:, 0::2], nibbles[:, 1::2] = packed >> 4, packed & 15
    code = np.array([*E2M1, *(-v for v in E2M1)], dtype=np.float32)[nibbles]
    raw = weight.scales.view(torch.uint8).numpy().reshape(-1)
    n, j = np.meshgrid(np.arange(rows), np.arange(cols // 16), indexing="ij")
    tile = (n // 128) * (cols // 64) + j // 4
    byte = raw[tile * 512 + (n % 32) * 16 + ((n % 128) // 32) * 4 + j % 4].astype(np.int32)
    exponent, mantissa = byte >> 3, byte & 7
    scale = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    total = scale.astype(np.float32) * np.float32(weight.scale_2)
    return torch.from_numpy(code * total.repeat(16, axis=1))


def check_fp32_against_numpy() -> None:
    """Raise `ComparisonError` where a random weight of six tiles reads otherwise."""
    weight = random_weight(384, 128, seed=4)
    compare("NVFP4 by numpy", weight.dequantize(torch.float32), read_by_numpy(weight), Identical())
