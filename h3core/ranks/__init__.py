"""Persistent rank processes for the suite: `RankPool` starts them, `run` gives all of them one task.

`task.py` says what a task is and how it travels, `child.py` is the life of a rank, `server.py` the fork server
they come from, `crew.py` one set of live processes, `failures.py` what is said when some fail, `pool.py` the face.
"""

from h3core.ranks.failures import RankError, RankFailure
from h3core.ranks.pool import RankPool
from h3core.ranks.task import Rank, RankFacts

__all__ = ["Rank", "RankError", "RankFacts", "RankFailure", "RankPool"]
