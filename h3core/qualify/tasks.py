"""Everything that ranks of the suite run, in one import: the fork server preloads it, so that ranks start warm."""

from h3core.qualify import controls
from h3core.qualify.checks import blocks, determinism, invariance, loop, shards, transport

__all__ = ["blocks", "controls", "determinism", "invariance", "loop", "shards", "transport"]
