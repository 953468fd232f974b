"""The preflight: what a machine is looked at for before any rank starts. It reads, judges, and changes nothing.

`box` reads everything into one value, `judging` holds the rules; each rule lives with its readers and parsers in a
file of its own. `finding` says what a finding is. No CUDA context is made, and comfy_kitchen is never imported.
"""

from __future__ import annotations

from h3core.qualify.preflight.box import Box, read_box
from h3core.qualify.preflight.environment import environment_facts, masked
from h3core.qualify.preflight.facts import machine_facts
from h3core.qualify.preflight.finding import Finding, NotMeasured
from h3core.qualify.preflight.gpu import Gpu
from h3core.qualify.preflight.judging import blocking, judge, unread
from h3core.qualify.preflight.lines import lines

__all__ = [
    "Box",
    "Finding",
    "Gpu",
    "NotMeasured",
    "blocking",
    "environment_facts",
    "judge",
    "lines",
    "machine_facts",
    "masked",
    "read_box",
    "unread",
]
