"""The command line: `python -m h3core generate`, `checkpoint`, `qualify`, `preflight` and `report`."""

from __future__ import annotations

import os

from h3core.numerics import MKL_CBWR

os.environ.setdefault("MKL_CBWR", MKL_CBWR)  # before torch's first product

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from h3core import __version__
from h3core.attention import BACKENDS
from h3core.checkpoint import cli as checkpoint_cli
from h3core.generate import Job, generate
from h3core.launch import Launch
from h3core.linear import LINEAR_KINDS
from h3core.packing import Geometry
from h3core.parallel import MODES, REDUCE_DTYPES


def add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The `generate` command."""
    parser = commands.add_parser(
        "generate",
        help="denoise one prompt embedding into video and audio latents",
        description="Alone it is one rank. For several: torchrun --nproc-per-node 8 -m h3core generate ...",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="denoiser: a safetensors file or its folder")
    parser.add_argument(
        "--prompt-embeds", type=Path, required=True, help="safetensors file with the tensor prompt_embeds (L, text_dim)"
    )
    parser.add_argument("--out", type=Path, default=Path("latents.safetensors"), help="latents to write")
    parser.add_argument("--report", type=Path, default=Path("report.json"), help="report to write")
    parser.add_argument("--geometry", default="864x480x141", help="WIDTHxHEIGHTxFRAMES: pixels, frames at 24 a second")
    parser.add_argument(
        "--steps",
        type=int,
        default=12,
        help="denoiser evaluations; diffusers' num_inference_steps counts one more, so 12 here is 13 there",
    )
    parser.add_argument("--seed", type=int, default=440420, help="means the same at every number of ranks")
    parser.add_argument(
        "--mode", choices=("auto", *MODES), default="auto", help="auto: single for one rank, else ulysses"
    )
    parser.add_argument("--attention", choices=list(BACKENDS), default="sdpa", help="attention backend")
    parser.add_argument("--linear", choices=LINEAR_KINDS, default="w4a16", help="how NVFP4 weights are multiplied")
    parser.add_argument(
        "--reduce-dtype", choices=list(REDUCE_DTYPES), default="activation", help="mode tensor: what partials travel in"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs where there are any"
    )
    parser.add_argument("--force", action="store_true", help="replace existing output files")
    parser.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    """Build the job from the arguments and run it."""
    try:
        world = Launch.from_environment().world
        geometry = Geometry.parse(args.geometry)
    except ValueError as error:
        return fail(str(error))
    return generate(
        Job(
            checkpoint=args.checkpoint,
            prompt_embeds=args.prompt_embeds,
            out=args.out,
            report=args.report,
            geometry=geometry,
            evaluations=args.steps,
            seed=args.seed,
            mode=args.mode if args.mode != "auto" else "single" if world == 1 else "ulysses",
            attention=args.attention,
            linear=args.linear,
            reduce_dtype=args.reduce_dtype,
            device=args.device,
            force=args.force,
        )
    )


def fail(message: str) -> int:
    """One line on stderr; exit code 2."""
    print(f"h3core: error: {message}", file=sys.stderr)
    return 2


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as one line, from rank 0 alone: the others would say the same."""
    if os.environ.get("RANK", "0") == "0":
        print(f"h3core: warning: {message}", file=sys.stderr)


def add_suite(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The suite's commands. Loaded when one may be meant: they need packages that the runtime does without."""
    try:
        from h3core.qualify import cli as qualify
        from h3core.qualify.preflight import cli as preflight
        from h3core.qualify.report import cli as report
    except ModuleNotFoundError as error:
        missing = f"this command needs {error.name}; pip install -c constraints.txt -e '.[qualify]'"
        for name in ("qualify", "preflight", "report"):
            stub = commands.add_parser(name, help=missing, add_help=False)
            stub.set_defaults(run=lambda _: fail(missing))
        return
    for room in (qualify, preflight, report):
        room.add_parser(commands)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the life of the process
    parser = argparse.ArgumentParser(prog="h3core", description="MiniMax-H3 over 1..N GPUs")
    parser.add_argument("--version", action="version", version=f"h3core {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_generate(commands)
    checkpoint_cli.add_parser(commands)
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] not in ("generate", "checkpoint"):
        add_suite(commands)
    own, rest = (words, []) if "--" not in words else (words[: words.index("--")], words[words.index("--") + 1 :])
    args = parser.parse_args(own, argparse.Namespace(rest=list(rest)))
    if rest and own[:1] != ["qualify"]:
        parser.error(f"{own[0] if own else 'no command'}: takes nothing after --, got {' '.join(rest)}")
    warnings.showwarning = show_warning
    try:
        code: int = args.run(args)
    except KeyboardInterrupt:
        print("h3core: interrupted; every output file is whole or absent", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head`; Python flushes once more on exit, and would complain again
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    return code


if __name__ == "__main__":
    sys.exit(main())
