"""The one comparison that every tier uses: it raises, or returns evidence of what was compared.

`assert` is never used for it (python -O would pass), and a comparison of nothing is an error: no elements,
or an expectation that is all one value, proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one comparison saw. `measured` holds the demand's own figures."""

    what: str
    demand: str
    elements: int
    bytes: int
    spread: float
    """Largest minus smallest expected value."""
    max_abs: float
    """Largest absolute difference."""
    measured: dict[str, float]
    rank: int | None = None
    """The rank that computed what was compared; None where it was no rank's own."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a report."""
        return asdict(self)


class ComparisonError(Exception):
    """A comparison failed, or compared nothing. The message says what, where and by how much."""


class Demand(Protocol):
    """What two tensors owe each other."""

    @property
    def text(self) -> str:
        """The demand in words."""

    def judge(self, got: Tensor, expected: Tensor) -> tuple[dict[str, float], str | None]:
        """Measured figures, and what is wrong (None: nothing)."""


def compare(what: str, got: Tensor, expected: Tensor, demand: Demand, *, rank: int | None = None) -> Evidence:
    """Compare `got` (computed by `rank`) with `expected` (same shape and dtype) under `demand`.

    Raises `ComparisonError` where the demand is not met, shapes or dtypes differ, there is nothing to compare,
    or `expected` is constant.
    """
    got, expected = got.detach().cpu(), expected.detach().cpu()
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise ComparisonError(
            f"{what}: got {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        )
    if not expected.numel():
        raise ComparisonError(f"{what}: nothing to compare, shape {tuple(expected.shape)}")
    wide = _widened(expected)
    if bool(wide.isnan().any()):
        raise ComparisonError(f"{what}: the expectation holds NaN, which nothing can be held against")
    spread = float(wide.max() - wide.min())
    if not spread > 0.0:
        raise ComparisonError(f"{what}: the expectation is constant ({float(wide.flatten()[0])}), which proves nothing")
    difference = (_widened(got) - wide).abs()
    measured, problem = demand.judge(got, expected)
    if problem is not None:
        raise ComparisonError(f"{what}: {problem} (demand: {demand.text})")
    largest = float(difference.max())
    return Evidence(what, demand.text, expected.numel(), expected.nbytes, spread, largest, measured, rank)


@dataclass(frozen=True, slots=True)
class Identical:
    """The same bytes."""

    @property
    def text(self) -> str:
        """See `Demand.text`."""
        return "bit for bit"

    def judge(self, got: Tensor, expected: Tensor) -> tuple[dict[str, float], str | None]:
        """Counts differing elements and names the first; -0.0 and 0.0 differ, a NaN equals itself."""
        differs = (_raw(got) != _raw(expected)).reshape(*expected.shape, -1).any(-1)
        count = int(differs.sum())
        if not count:
            return {"differing": 0.0}, None
        first = tuple(int(i) for i in differs.nonzero()[0])
        rows = sorted({int(i) for i in differs.nonzero()[:, 0]}) if differs.ndim else []
        gap = (_widened(got) - _widened(expected)).abs()
        return {"differing": float(count)}, (
            f"{count} of {expected.numel()} elements differ in {len(rows)} rows (first rows {rows[:8]}), first at "
            f"{first}: got {_widened(got)[first].item()!r}, expected {_widened(expected)[first].item()!r}; largest "
            f"difference {gap.nan_to_num(math.inf, math.inf).max().item():.3g}"
        )


@dataclass(frozen=True, slots=True)
class RelativeRows:
    """On every row, the norm of the difference is at most `limit` times the norm of the expected row."""

    limit: float
    reason: str
    """Why the limit has this size."""

    @property
    def text(self) -> str:
        """See `Demand.text`."""
        return f"relative error of each row at most {self.limit:g}: {self.reason}"

    def judge(self, got: Tensor, expected: Tensor) -> tuple[dict[str, float], str | None]:
        """The worst row's relative error; a NaN fails."""
        want = _widened(expected).flatten(1)
        error = (_widened(got).flatten(1) - want).norm(dim=1) / want.norm(dim=1)
        error = error.nan_to_num(math.inf, math.inf)
        worst, row = float(error.max()), int(error.argmax())
        measured = {"worst_row_relative_error": worst}
        return measured, None if worst <= self.limit else f"row {row} has relative error {worst:.3g}"


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """Is a sharded result as good as the single-rank one, though not equal to it?

    `got` is the sharded velocity, `expected` the single-rank one, `reference` the same in fp32. The ratio of rms
    distances to the reference must lie in [low, high], the worst row be at most `worst_row` times the worst row
    of single, and (`distinct`) the difference not be zero, or the mode was not taken. Needs `min_rows` rows: the ratio
    spreads by about 0.15 / sqrt(rows).
    """

    reference: Tensor
    low: float
    high: float
    worst_row: float = 2.0
    min_rows: int = 64
    distinct: bool = True
    """False for unrounded (fp32) partials: added in rank order they can be one rank's own sum, as on a CPU with AMX."""

    @property
    def text(self) -> str:
        """See `Demand.text`."""
        return (
            f"rms distance to fp32, over that of one rank, in [{self.low:g}, {self.high:g}]; worst row at most "
            f"{self.worst_row:g} x one rank's worst{'; not identical to one rank' if self.distinct else ''}"
        )

    def judge(self, got: Tensor, expected: Tensor) -> tuple[dict[str, float], str | None]:
        """The ratios; a NaN fails every one of them."""
        if expected.shape[0] < self.min_rows:
            return {}, f"{expected.shape[0]} rows are too few for the statistic, expected at least {self.min_rows}"
        if self.reference.shape != expected.shape:
            return {}, f"got a reference of shape {tuple(self.reference.shape)}, expected {tuple(expected.shape)}"
        reference = _widened(self.reference.detach().cpu())
        sharded, single = _widened(got) - reference, _widened(expected) - reference
        measured = {
            "rms_ratio": float(sharded.norm() / single.norm()),
            "worst_row_ratio": float(sharded.norm(dim=1).max() / single.norm(dim=1).max()),
            "single_relative_error": float(single.norm() / reference.norm()),
            "distance_to_single": float((_widened(got) - _widened(expected)).norm() / single.norm()),
        }
        problems = []
        if not self.low <= measured["rms_ratio"] <= self.high:
            problems.append(f"rms ratio {measured['rms_ratio']:.4f}")
        if not measured["worst_row_ratio"] <= self.worst_row:
            problems.append(f"worst-row ratio {measured['worst_row_ratio']:.3f}")
        if self.distinct and not measured["distance_to_single"] > 0.0:
            problems.append("identical to one rank: the mode was not taken")
        return measured, "; ".join(problems) or None


def equal_facts(what: str, got: Any, expected: Any, *, rank: int | None = None) -> Evidence:
    """Compare two plain values (counts, digests) that must be equal and not empty.

    Raises `ComparisonError` that shows both.
    """
    if expected is None or (hasattr(expected, "__len__") and not len(expected)):
        raise ComparisonError(f"{what}: nothing to compare, expected {expected!r}")
    if got != expected:
        raise ComparisonError(f"{what}: got {got!r}, expected {expected!r}")
    count = len(expected) if hasattr(expected, "__len__") else 1
    return Evidence(what, "equal", count, 0, 0.0, 0.0, {}, rank)


class Comparisons:
    """Several comparisons of one rank's task, judged together at the end.

    A rank that raised between two collectives would leave its peers waiting in the next one, and one wrong
    byte would look like a hang.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.evidence: list[Evidence] = []
        self.problems: list[str] = []

    def compare(self, what: str, got: Tensor, expected: Tensor, demand: Demand) -> None:
        """As `compare`, but a failure is kept."""
        self._keep(lambda: compare(what, got, expected, demand, rank=self.rank))

    def equal_facts(self, what: str, got: Any, expected: Any) -> None:
        """As `equal_facts`, but a failure is kept."""
        self._keep(lambda: equal_facts(what, got, expected, rank=self.rank))

    def finish(self) -> list[Evidence]:
        """All evidence. Raises `ComparisonError` with every problem; nothing compared is one."""
        if not self.evidence and not self.problems:
            raise ComparisonError("nothing was compared")
        if self.problems:
            first, *others = self.problems
            # One line a problem: reports show the first, and have the others in the details.
            head = f"{first} (the first of {len(self.problems)} such)" if others else first
            raise ComparisonError("\n".join([head, *others]))
        return self.evidence

    def _keep(self, check: Callable[[], Evidence]) -> None:
        try:
            self.evidence.append(check())
        except ComparisonError as error:
            self.problems.append(str(error))


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.float64)


def _raw(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8).view(x.numel(), x.element_size())
