"""Registers h3core's pytest plugin; everything else lives in h3core.qualify."""

import os

# Before torch loads MKL: its fp32 products otherwise depend on how operands are aligned and on the number of threads.
os.environ.setdefault("MKL_CBWR", "AVX2")

pytest_plugins = ["h3core.qualify.plugin"]
