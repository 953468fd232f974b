"""What a failure is about: its fault class, what it means, what to do next.

The class is a lead, not a proof. What the error itself says goes first (a rank killed by the kernel is not a wrong
sum); then what the check was about; and where transport or computation alone are broken in the same run, whatever else
failed is told as their consequence.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Final, Literal

from h3core.qualify.checks.compare import ComparisonError
from h3core.qualify.manifest import Area
from h3core.ranks import RankError, RankFailure

FaultClass = Literal["hardware", "interconnect", "stack", "suite"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A fault class with its meaning and the next action."""

    fault_class: FaultClass
    meaning: str
    action: str


@dataclass(frozen=True, slots=True)
class Failure:
    """What one check failed of: `text` is all that was said, `ranks` those that were named first."""

    problem: str
    text: str
    ranks: tuple[int, ...]
    judged: bool
    """Whether something was measured and found wrong, or ranks failed; else the check itself broke."""


SIGNS: Final[tuple[tuple[str, Diagnosis], ...]] = (
    (
        r"uncorrectable ECC|Xid.*\b(48|63|64|74|79|94|95)\b|fallen off the bus|GPU is lost",
        Diagnosis(
            "hardware",
            "A GPU reported an error of its own memory, link or bus.",
            "Give the GPU's UUID and the kernel's Xid lines to the provider and ask for another host.",
        ),
    ),
    (
        r"killed by SIGKILL",
        Diagnosis(
            "stack",
            "Something outside the suite killed a rank; most often it is the kernel, for lack of memory.",
            "Look for 'Out of memory' in dmesg and at the container's memory limit; then run the check alone.",
        ),
    ),
    (
        r"left with exit code 255",
        Diagnosis(
            "stack",
            "The process that starts ranks was killed, and its ranks with it; most often for lack of memory.",
            "Look for 'Out of memory' in dmesg and at the container's memory limit; then run the check alone.",
        ),
    ),
    (
        r"killed by SIGBUS|No space left on device|/dev/shm",
        Diagnosis(
            "stack",
            "Shared memory or a temporary folder is full: a mapped file could not grow.",
            "Free /dev/shm and the temporary folder (df -h /dev/shm /tmp), or start the container with --shm-size=1g.",
        ),
    ),
    (
        r"killed by SIG(SEGV|ILL|ABRT|FPE)",
        Diagnosis(
            "stack",
            "A rank crashed in native code: a library that does not fit this CPU, GPU or driver, or faulty memory.",
            "Run the check alone three times: the same place each time is the software, another place is the memory.",
        ),
    ),
    (
        r"no kernel image|driver version is insufficient|forward compatibility|undefined symbol|cannot open shared",
        Diagnosis(
            "stack",
            "torch, its CUDA libraries and the driver or GPU do not fit together.",
            "Compare torch, CUDA and driver in the machine section; install a torch for this GPU, or another image.",
        ),
    ),
    (
        r"out of memory|DefaultCPUAllocator|Cannot allocate memory",
        Diagnosis(
            "stack",
            "The check needs more memory than was free.",
            "End other processes on this machine, or use a smaller world; the preflight says what was free.",
        ),
    ),
    (
        r"rank \d+ hung|no answer within",
        Diagnosis(
            "interconnect",
            "Ranks waited for a message that never came. The first one named is the one the others waited for.",
            "Run the check alone. If it hangs again, look at that rank's stack in the details; on a CPU check the "
            "loopback interface and the firewall, on GPUs try NCCL_P2P_DISABLE=1 to see whether the link is to blame.",
        ),
    ),
    (
        r"connection (was )?(reset|closed|refused)|broken pipe|gloo.*time",
        Diagnosis(
            "interconnect",
            "A connection between ranks broke while both sides lived.",
            "Check the loopback interface, the firewall and limits on open files (ulimit -n); run the check alone.",
        ),
    ),
)
"""What an error says of itself, first match wins."""

BROKEN_CHECK: Final = Diagnosis(
    "suite",
    "The check itself broke before it could compare anything: this says nothing about the machine.",
    "Run `make test`. If that passes, report the details as a bug of h3core.",
)

BASIC: Final[tuple[Area, ...]] = ("transport", "computation")
"""What all other checks are made of: a fault there explains theirs."""
URGENCY: Final[tuple[Area | None, ...]] = (*BASIC, "loading", "parity", "numerics", "control", None)
"""In which order failures are told: causes before what may follow from them."""

BY_AREA: Final[dict[Area, Diagnosis]] = {
    "transport": Diagnosis(
        "interconnect",
        "Bytes arrived other than they were sent.",
        "Run the check alone. Wrong in the same place again: the communication library; in another place: a link or "
        "memory. Give the named ranks to the provider.",
    ),
    "computation": Diagnosis(
        "hardware",
        "The same work on the same input gave other bytes: silent data corruption, or ranks on unequal hardware.",
        "Run the check alone. If the same rank differs again, ask the provider to replace its device; compare the "
        "device names in the machine section first.",
    ),
    "parity": Diagnosis(
        "stack",
        "Real ranks computed other bits than the same partition in one process, though transport and computation "
        "alone are sound here.",
        "Run the check alone; if it fails again, send this report to h3core with the versions that it lists.",
    ),
    "numerics": Diagnosis(
        "stack",
        "A sharded run is not as good as a run on one rank: a library on this machine computes otherwise with other "
        "shapes.",
        "Read the row-invariance table: the operation named there breaks it. Try the tested torch version, and keep "
        "MKL_CBWR as the suite sets it.",
    ),
    "loading": Diagnosis(
        "suite",
        "A rank read, held or sent other bytes than its share.",
        "Run `make test`; if that passes, check the disk (the checkpoint's sha256), then report it to h3core.",
    ),
    "control": Diagnosis(
        "suite",
        "A planted fault went unseen: on this machine a pass of this suite would mean nothing.",
        "Report it to h3core with this report, before trusting any other line of it.",
    ),
}


def failure_of(error: BaseException, text: str) -> Failure:
    """What `error` says; `text` is pytest's rendering of it."""
    if isinstance(error, RankError):
        first = error.failures[0] if error.failures else None
        # All that are as likely the cause as the first: when bytes go wrong, sender and receiver may both complain.
        likely = [failure.rank for failure in error.failures if first and failure.severity == first.severity]
        named = tuple(sorted(likely))
        judged = first is None or first.kind != "raised" or first.message.startswith("ComparisonError")
        # Another exception in a rank that the whole box throws (CUDA, NCCL) is the box's; SIGNS know it.
        judged = judged or any(re.search(pattern, str(error), re.IGNORECASE) for pattern, _ in SIGNS)
        return Failure(_first_line(error) if first is None else _rank_line(first), text, named, judged)
    ranks = tuple(sorted({int(rank) for rank in re.findall(r"\brank (\d+)\b", _first_line(error))}))
    return Failure(_first_line(error), text, ranks, isinstance(error, ComparisonError | AssertionError))


def diagnose(failure: Failure, area: Area | None, broken: Set[Area]) -> Diagnosis:
    """The diagnosis of a failure of a check about `area`, in a run in which checks about `broken` failed."""
    for pattern, diagnosis in SIGNS:
        if re.search(pattern, failure.problem, re.IGNORECASE):
            return diagnosis
    if not failure.judged or area is None:
        return BROKEN_CHECK
    if area not in BASIC:
        for basic in BASIC:
            if basic in broken:
                return consequence(basic)
    return BY_AREA[area]


def consequence(basic: Area) -> Diagnosis:
    """Of a check that can only be as sound as what it is made of."""
    return Diagnosis(
        BY_AREA[basic].fault_class,
        f"Probably a consequence: checks of {basic} alone failed in this run, and this one is made of it.",
        f"See to the checks of {basic} first; then run this one again.",
    )


def _rank_line(first: RankFailure) -> str:
    """What the likely cause among the ranks said; a comparison's own words are enough."""
    said = first.message.removeprefix("ComparisonError: ")
    verb = "" if first.kind == "raised" else f" {first.kind}"
    return f"rank {first.rank}{verb}: {said}"


def _first_line(error: BaseException) -> str:
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
