"""h3core: denoise MiniMax-H3 over 1..N GPUs, and qualify the hardware that does it."""

__version__ = "0.1.0"
