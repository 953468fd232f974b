"""Registers h3core's pytest plugin; everything else lives in h3core.qualify."""

import os

from h3core.numerics import MKL_CBWR

os.environ.setdefault("MKL_CBWR", MKL_CBWR)

pytest_plugins = ["h3core.qualify.plugin", "pytester"]
