"""The kernel's log, where it can be read: the driver's Xid lines in it, and how far back it goes."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3core.qualify.preflight.finding import NotMeasured, Unreadable, attempt
from h3core.qualify.preflight.gpu import pci_address

_KMSG: Final = re.compile(r"\d+,\d+,(\d+),[^;]*;(.*)")
_DMESG: Final = re.compile(r"(?:<\d+>)?\[\s*(\d+\.\d+)\]\s?(.*)")
_XID: Final = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]*\): (\d+),?\s*(.*)"
)
_DRIVER: Final = re.compile(r"\bNVRM:|\bnvidia\b", re.IGNORECASE)
_RECORD: Final = 1 << 16
WRAPPED_AFTER_S: Final = 1.0
"""A log whose first line is later than this has lost its beginning: the kernel's first lines come at 0.0."""


@dataclass(frozen=True, slots=True)
class Xid:
    """One Xid line: seconds after boot, the GPU's PCI address, the code and the rest of the line."""

    seconds: float
    pci: str
    code: int
    text: str


@dataclass(frozen=True, slots=True)
class KernelLog:
    """What the log holds, seconds after boot. `uptime` is now, by the same clock."""

    first: float
    lines: int
    names_driver: bool
    """Whether NVIDIA's driver has written a line."""
    xids: tuple[Xid, ...]
    uptime: float | None = None


def read_kernel_log(root: Path, run: Callable[[Sequence[str]], str]) -> KernelLog:
    """/dev/kmsg, or else what `dmesg` prints. Raises `Unreadable` with both reasons."""
    by_device = attempt(lambda: parse_log(read_kmsg(root / "dev/kmsg")))
    log = by_device if isinstance(by_device, KernelLog) else attempt(lambda: parse_log(run(["dmesg"])))
    if isinstance(log, NotMeasured):
        first = by_device.reason if isinstance(by_device, NotMeasured) else ""
        raise Unreadable(f"kernel log: {first}; dmesg: {log.reason}")
    uptime = attempt(lambda: float((root / "proc/uptime").read_text().split()[0]))
    return KernelLog(
        log.first, log.lines, log.names_driver, log.xids, None if isinstance(uptime, NotMeasured) else uptime
    )


def read_kmsg(path: Path) -> str:
    """Every record that /dev/kmsg holds now. One read gives one record; at the end it would wait for the next."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        parts: list[bytes] = []
        while True:
            try:
                part = os.read(descriptor, _RECORD)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # the oldest record was overwritten while we read
                    continue
                raise
            if not part:
                break
            parts.append(part)
    finally:
        os.close(descriptor)
    return b"".join(parts).decode(errors="replace")


def parse_log(text: str) -> KernelLog:
    """The log in the form of /dev/kmsg or of dmesg. Raises `Unreadable` where no line has either form."""
    entries = []
    for line in text.splitlines():
        if match := _KMSG.fullmatch(line):
            entries.append((int(match[1]) / 1e6, match[2]))
        elif match := _DMESG.fullmatch(line):
            entries.append((float(match[1]), match[2]))
    if not entries:
        raise Unreadable("it is empty" if not text.strip() else f"unknown form: {text.splitlines()[0][:60]!r}")
    xids = tuple(
        Xid(seconds, pci_address(match[1]), int(match[2]), match[3])
        for seconds, line in entries
        if (match := _XID.search(line))
    )
    names_driver = any(_DRIVER.search(line) for _, line in entries)
    return KernelLog(min(seconds for seconds, _ in entries), len(entries), names_driver, xids)
