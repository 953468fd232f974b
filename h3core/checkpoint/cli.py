"""`h3core checkpoint ...`: make checkpoints from the command line."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from tqdm import tqdm

from h3core.checkpoint.layout import expected_tensors
from h3core.checkpoint.safetensors_format import encode_header, file_bytes, offsets
from h3core.checkpoint.synthesize import DEFAULT_SEED, plan_files, synthesize
from h3core.config import H3, TINY, H3Config

SIZES: Final[dict[str, H3Config]] = {"tiny": TINY, "h3": H3}

FORMATS: Final[dict[str, tuple[str, str]]] = {
    "nvfp4-pruned": ("pruned", "nvfp4"),
    "bf16-pruned": ("pruned", "bf16"),
    "diffusers": ("diffusers", "bf16"),
    "native": ("native", "bf16"),
}
"""Format -> (layout, quantisation)."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `checkpoint`; its parsed arguments carry `run`, which takes them and returns an exit code."""
    parser = subparsers.add_parser("checkpoint", help="make denoiser checkpoints", description=__doc__)
    commands = parser.add_subparsers(dest="checkpoint_command", required=True, metavar="COMMAND")
    make = commands.add_parser(
        "synthesize",
        help="write random weights that behave like the model",
        description="Write a denoiser checkpoint of random weights that behave like a model's: activations of order "
        "one through every block, and every row and weight visible in the output. The same seed gives the same bytes, "
        "and the same model in the formats native and diffusers.",
    )
    make.add_argument(
        "out",
        metavar="OUT",
        type=Path,
        help="file to write (nvfp4-pruned, bf16-pruned; native where it ends in .safetensors), or folder (the others)",
    )
    make.add_argument("--size", choices=SIZES, required=True, help="tiny: for tests; h3: the released sizes")
    make.add_argument("--format", choices=FORMATS, required=True, help="layout and quantisation of the file")
    make.add_argument("--seed", type=int, default=DEFAULT_SEED, help="default: %(default)s")
    make.add_argument("--force", action="store_true", help="replace OUT if it is a checkpoint already")
    make.add_argument(
        "--dry-run",
        action="store_true",
        help="write nothing; print every tensor (dtype, shape, offsets in the data), and last the bytes of all files",
    )
    make.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run a parsed `checkpoint` command. Returns 0, or 2 after one line on stderr for what the user can mend."""
    try:
        if args.dry_run:
            dry_run(args.out, args.size, args.format)
        else:
            _synthesize(args)
    except BrokenPipeError:
        # `--dry-run | head`. Python flushes stdout once more on exit, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        sys.stderr.write(f"h3core: error: {' '.join(str(error).split())}\n")
        return 2
    return 0


def dry_run(out: Path, size: str, format_: str) -> None:
    """Print the layout of every file that would be written, and on the last line their total bytes alone."""
    layout, quant = FORMATS[format_]
    files = plan_files(out, expected_tensors(SIZES[size], layout, quant), layout)
    for path, specs in files.items():
        header = len(encode_header(specs)) - 8
        sys.stdout.write(f"{path}: {file_bytes(specs)} bytes, header {header}, {len(specs)} tensors\n")
        for name, spec, start, stop in offsets(specs):
            shape = "x".join(map(str, spec.shape)) or "scalar"
            sys.stdout.write(f"{name} {spec.dtype} {shape} {start}-{stop}\n")
    sys.stdout.write(f"{sum(map(file_bytes, files.values()))}\n")
    sys.stdout.flush()


def _synthesize(args: argparse.Namespace) -> None:
    layout, quant = FORMATS[args.format]
    config = SIZES[args.size]
    total = sum(map(file_bytes, plan_files(args.out, expected_tensors(config, layout, quant), layout).values()))
    # tqdm takes `None` here for: no bar where stderr is no terminal.
    with (
        _terminated_as_exit(),
        tqdm(total=total, unit="B", unit_scale=True, desc=args.out.name, disable=None, leave=False) as bar,
    ):
        size = synthesize(
            args.out,
            config=config,
            layout=layout,
            quant=quant,
            seed=args.seed,
            force=args.force,
            progress=bar.update,
        )
    sys.stdout.write(f"{args.out}: {size} bytes, {args.size} {args.format}, seed {args.seed}\n")


@contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that a half-written file is removed; it would otherwise be left behind."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    try:
        before: Any = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread: signals are somebody else's
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
