"""`h3core preflight`: look at this machine before any rank starts.

Exit codes: 0 no problem; 1 at least one; 10 no problem was found, but on a run with GPUs something could not be read
that the run cannot be judged without; 2 the command itself was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

from h3core.qualify.preflight.box import Box, read_box
from h3core.qualify.preflight.environment import environment_facts
from h3core.qualify.preflight.facts import machine_facts
from h3core.qualify.preflight.finding import Finding, NotMeasured
from h3core.qualify.preflight.judging import judge, unread
from h3core.qualify.preflight.lines import lines
from h3core.qualify.preflight.loading import host_bytes

EXIT_PROBLEM: Final = 1
EXIT_UNREAD: Final = 10


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `preflight`; its parsed arguments carry `run`, which takes them and returns an exit code."""
    parser = subparsers.add_parser(
        "preflight",
        help="look at this machine before any rank starts",
        description="Read GPUs, driver, memory, /dev/shm, NCCL's settings, PCIe and the kernel log, and say what is "
        "wrong and what to do. Changes nothing and uses no GPU. Exit code: 0 no problem, 1 a problem, 10 something "
        "needed could not be read.",
    )
    parser.add_argument("--world", type=_ranks, metavar="N", help="ranks that are to run; default: open")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there are GPUs"
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="PATH", help="hold the memory that loading it takes against this host's"
    )
    parser.add_argument("--share-gpus", action="store_true", help="several ranks may share a GPU: no links tested")
    parser.add_argument("--allow-mixed", action="store_true", help="unlike GPUs are meant")
    parser.add_argument("--json", action="store_true", help="print findings and facts as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run a parsed `preflight` command. Returns an exit code; 2 after one line on stderr for a bad checkpoint."""
    box = read_box()
    device = device_of(box, args.device)
    world: int | None = args.world
    needed = None
    if args.checkpoint is not None:
        try:
            needed = host_bytes(args.checkpoint, device, world or ranks_that_fit(box, device))
        except (ValueError, OSError) as error:
            print(f"h3core: error: {error}", file=sys.stderr)
            return 2
    findings = judge(
        box,
        world=world,
        device=device,
        needed_bytes=needed,
        share_gpus=args.share_gpus,
        allow_mixed=args.allow_mixed,
    )
    if args.json:
        print(
            json.dumps(
                {
                    "device": device,
                    "world": world,
                    "findings": [finding.as_dict() for finding in findings],
                    "machine": machine_facts(box),
                    "environment": environment_facts(box.environ),
                },
                indent=1,
            )
        )
    else:
        print("\n".join(lines(findings)))
    return exit_code(findings)


def device_of(box: Box, asked: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The device to judge for. "auto" is cuda where torch counts GPUs, and where NVML lists some that torch does not
    see: an old driver or a CPU build of torch must not pass for a machine without GPUs.
    """
    if asked != "auto":
        return asked
    if not isinstance(box.torch.devices, NotMeasured) and box.torch.devices:
        return "cuda"
    hidden = not isinstance(box.visible, NotMeasured) and box.visible.hides_all
    listed = not isinstance(box.nvml, NotMeasured) and (box.nvml.gpus or box.nvml.lost)
    return "cuda" if listed and not hidden else "cpu"


def ranks_that_fit(box: Box, device: Literal["cpu", "cuda"]) -> int:
    """Ranks to count memory for where --world does not say: one for each GPU, one on a CPU."""
    count = box.torch.devices
    return 1 if device == "cpu" or isinstance(count, NotMeasured) else max(1, count)


def exit_code(findings: Iterable[Finding]) -> int:
    """0, 1 for a problem, 10 where a needed reading is missing."""
    listed = list(findings)
    if any(finding.state == "problem" for finding in listed):
        return EXIT_PROBLEM
    return EXIT_UNREAD if unread(listed) else 0


def _ranks(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of ranks from 1 on")
    return int(text)
