"""Negative controls: five faults, planted on purpose in every qualification, each of which a check must catch.

A pass means that this run's own comparison and this run's own ranks tell a fault from health: sound ranks pass,
the fault is shown to have taken place exactly once, and it is caught. `base.py` says what a control is, `payload.py`
has the faults of what is sent, `lost.py` those of ranks, `table.py` the five. Nothing here can be reached from
`h3core generate` or the environment. Run them with: pytest -m gloo tests/gloo/test_controls.py
"""

from h3core.qualify.controls.base import GUILTY, Bench, Caught, Control, MissedControl, NotPlanted
from h3core.qualify.controls.table import CONTROLS, run_control

__all__ = ["CONTROLS", "GUILTY", "Bench", "Caught", "Control", "MissedControl", "NotPlanted", "run_control"]
