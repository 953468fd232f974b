"""Determinism screen: the same seeded work on every rank, several times over, has the same bytes everywhere.

A pass means that no rank disagreed with itself or with the others in a matrix product, attention or a dequantisation.
It takes no oracle, so any box can run it; what is wrong in the same way on all ranks it cannot see.
Run it with: pytest -m gloo tests/gloo/test_determinism.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import torch
from torch import Tensor

from h3core.attention import attention_backend
from h3core.linear import dense
from h3core.nvfp4 import NVFP4Weight
from h3core.qualify.checks.compare import ComparisonError, Evidence
from h3core.ranks import Rank

K = TypeVar("K", bound=Hashable)

DEMAND: Final = "the same bytes on every rank and at every repeat"


@dataclass(frozen=True, slots=True)
class Work:
    """Sizes of what is computed: x (rows, inner) times W (columns, inner), attention over rows, an NVFP4 weight.

    `columns` is a multiple of 128 and `inner` of 64, as NVFP4 needs it. Made for a CPU, where they are large enough
    for vectorised kernels; a GPU takes larger ones.
    """

    rows: int = 160
    inner: int = 1152
    columns: int = 384
    heads: int = 3
    width: int = 128
    attention: str = "sdpa"
    seed: int = 440420


@dataclass(frozen=True, slots=True)
class Result:
    """One operation on one rank: digests of its inputs and of its output at each repeat; sizes of one output."""

    inputs: str
    digests: tuple[str, ...]
    elements: int
    bytes: int
    spread: float
    """Largest minus smallest value of the output."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Tensors that are read, and the computation that reads them: a new output at each call."""

    inputs: tuple[Tensor, ...]
    compute: Callable[[], Tensor]


def operations(work: Work, device: torch.device) -> dict[str, Operation]:
    """The screen's operations by name. Data come from the work's own seed, on the CPU: equal on every rank."""
    generator = torch.Generator().manual_seed(work.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    def bits(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8).to(device)

    table: dict[str, Operation] = {}
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = draw(work.rows, work.inner).to(dtype), draw(work.columns, work.inner).to(dtype)
        table[f"{_name(dtype)} GEMM"] = Operation((x, weight), lambda x=x, weight=weight: dense(x, weight))  # type: ignore[misc]
    attend = attention_backend(work.attention)
    q, k, v = (draw(work.rows, work.heads, work.width).bfloat16() for _ in range(3))
    table["bf16 attention"] = Operation((q, k, v), lambda: attend(q, k, v))
    codes, scales = bits(0, 256, work.columns, work.inner // 2), bits(0x20, 0x60, work.columns, work.inner // 16)
    nvfp4 = NVFP4Weight(codes, scales.view(torch.float8_e4m3fn), torch.tensor(0.01, device=device))
    table["NVFP4 dequantisation"] = Operation((codes, scales, nvfp4.scale_2), lambda: nvfp4.dequantize(torch.bfloat16))
    return table


def screen(rank: Rank, work: Work, repeats: int) -> dict[str, Result]:
    """Task: compute every operation `repeats` times from the same inputs. Ranks exchange nothing.

    Raises ComparisonError where an output is constant or holds NaN, which would be the same bytes for nothing.
    """
    with torch.inference_mode():
        return {name: repeated(name, operation, repeats) for name, operation in operations(work, rank.device).items()}


def repeated(name: str, operation: Operation, repeats: int) -> Result:
    """`operation` computed `repeats` times, each output hashed. Raises as `screen`; ValueError without repeats."""
    if repeats < 1:
        raise ValueError(f"{name}: got {repeats} repeats, expected at least 1")
    inputs, digests, spread = digest(*operation.inputs), [], 0.0
    for _ in range(repeats):
        output = operation.compute()
        digests.append(digest(output))
        if len(digests) == 1:
            spread = float(output.amax().double() - output.amin().double())
        # A kernel that writes nothing would leave the last result in the memory that the allocator hands out again.
        output.fill_(torch.nan)
    if not spread > 0.0:
        raise ComparisonError(f"{name}: the output spans {spread}: constant or NaN, which proves nothing")
    return Result(inputs, tuple(digests), output.numel(), output.nbytes, spread)


def digest(*parts: Tensor) -> str:
    """BLAKE2b of the tensors' bytes."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return state.hexdigest()


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with one operation, and the ranks that it can have come from.

    kind: "self", disagrees with itself; "inputs", was given other inputs; "odd", steadily differs from the majority;
    "undecided", some of `ranks` differ, and no majority says which.
    """

    kind: Literal["self", "inputs", "odd", "undecided"]
    operation: str
    ranks: tuple[int, ...]
    message: str


class Corruption(ComparisonError):
    """Ranks did not compute the same bytes. `findings`: a rank that disagrees with itself comes first."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        order = ("self", "inputs", "odd", "undecided")
        self.findings = tuple(sorted(findings, key=lambda finding: order.index(finding.kind)))
        super().__init__("; ".join(f"{finding.operation}: {finding.message}" for finding in self.findings))


def judge(per_rank: Sequence[Mapping[str, Result]]) -> list[Evidence]:
    """Hold the ranks' results against each other: one `Evidence` per rank and operation.

    Raises Corruption where any byte differs; ComparisonError where there is nothing to hold against each other, or
    where ranks did not do the same work.
    """
    names = list(dict.fromkeys(name for results in per_rank for name in results))
    if not names:
        raise ComparisonError(f"nothing to compare: {len(per_rank)} ranks, no operation")
    for rank, results in enumerate(per_rank):
        if missing := [name for name in names if name not in results]:
            raise ComparisonError(f"rank {rank} of {len(per_rank)} has no result of {', '.join(missing)}")
    evidence: list[Evidence] = []
    findings: list[Finding] = []
    for name in names:
        ranks = [by_name[name] for by_name in per_rank]
        sizes = {(len(result.digests), result.elements, result.bytes) for result in ranks}
        if len(sizes) != 1:
            raise ComparisonError(f"{name}: ranks differ in repeats, elements and bytes: {sorted(sizes)}")
        ((repeats, elements, size),) = sizes
        if len(ranks) * repeats < 2 or not elements:
            raise ComparisonError(
                f"{name}: nothing to compare: {len(ranks)} ranks, {repeats} repeats, {elements} elements"
            )
        findings += judge_operation(name, ranks)
        for rank, result in enumerate(ranks):
            what = f"{name}, rank {rank} of {len(ranks)}"
            count, length = elements * repeats, size * repeats
            evidence.append(
                Evidence(what, DEMAND, count, length, result.spread, 0.0, {"repeats": float(repeats)}, rank)
            )
    if findings:
        raise Corruption(findings)
    return evidence


def judge_operation(name: str, results: Sequence[Result]) -> list[Finding]:
    """Findings about one operation. Who disagrees with itself, or has other inputs, has no vote on the outputs."""
    world = len(results)
    findings = []
    by_input = _groups({rank: result.inputs for rank, result in enumerate(results)})
    findings += _vote("inputs", name, by_input, world, "was given other inputs than the rest: corrupted before any use")
    unsteady = {rank: result for rank, result in enumerate(results) if len(set(result.digests)) > 1}
    for rank, result in unsteady.items():
        findings.append(Finding("self", name, (rank,), f"rank {rank} of {world} disagrees with itself: {_odd(result)}"))
    for alike in by_input:
        voters = {rank: results[rank].digests[0] for rank in alike if rank not in unsteady}
        findings += _vote("odd", name, _groups(voters), world, "steadily computes other bytes than the rest")
    return findings


def _vote(
    kind: Literal["inputs", "odd"], name: str, groups: Sequence[tuple[int, ...]], world: int, charge: str
) -> list[Finding]:
    """A majority of the voters names the others; without one, every group is named."""
    if len(groups) < 2:
        return []
    everyone = tuple(sorted(rank for group in groups for rank in group))
    if 2 * len(groups[0]) > len(everyone):
        odd = tuple(sorted(rank for group in groups[1:] for rank in group))
        return [Finding(kind, name, odd, f"{_ranks(odd)} of {world} {charge}")]
    what = "given" if kind == "inputs" else "computed"
    if len(everyone) == 2:
        message = f"rank {everyone[0]} or {everyone[1]} was {what} wrong bytes: two ranks cannot tell which"
    else:
        message = f"no majority: {' and '.join(_ranks(group) for group in groups)} differ, any of them can be wrong"
    return [Finding("undecided", name, everyone, message)]


def _groups(values: Mapping[int, K]) -> list[tuple[int, ...]]:
    """Ranks that hold the same value, the largest group first."""
    ranks: dict[K, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return sorted((tuple(group) for group in ranks.values()), key=lambda group: (-len(group), group))


def _odd(result: Result) -> str:
    """Which repeats stand out, where a majority of them agrees."""
    groups = _groups(dict(enumerate(result.digests, 1)))
    if 2 * len(groups[0]) <= len(result.digests):
        return f"{len(groups)} different results in {len(result.digests)} repeats"
    odd = sorted(repeat for group in groups[1:] for repeat in group)
    return f"repeat {', '.join(map(str, odd))} of {len(result.digests)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
