"""How ranks exchange rows and heads: one set of collectives, over processes or over threads."""

from h3core.comm.base import Comm, PhaseStats
from h3core.comm.process import ProcessGroupComm
from h3core.comm.virtual import ThreadComm, alone, run_virtual

__all__ = ["Comm", "PhaseStats", "ProcessGroupComm", "ThreadComm", "alone", "run_virtual"]
