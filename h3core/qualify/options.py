"""Options of the suite, each with its twin in the environment, and where a run's values came from.

An option wins over its variable. One that the selected tier would ignore is refused: an option without effect
makes people believe that something was tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pytest

from h3core.attention import BACKENDS
from h3core.config import TINY
from h3core.linear import LINEAR_KINDS
from h3core.packing import Geometry
from h3core.qualify.tiers import DEFAULT_WORLDS, Tier

LONGEST: Final = 86_400.0
"""Seconds: a day. What waits longer waits for ever, and larger numbers overflow in the operating system."""
RANK_MODES: Final = ("ulysses", "tensor")
ALL: Final = ("gloo", "nccl", "gate")
GPU: Final = ("nccl", "gate")


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `parse` raises `ValueError`, saying got and expected; `reduces`: other values are another profile."""

    flag: str
    variable: str
    metavar: str | None
    default: Any
    parse: Callable[[str], Any]
    help: str
    tiers: tuple[str, ...] = ALL
    reduces: bool = False

    @property
    def name(self) -> str:
        """Name in `Settings`."""
        return self.flag.removeprefix("--").replace("-", "_")

    def words(self) -> dict[str, Any]:
        """How argparse, and pytest's parser with it, is told of this option."""
        kind = {"action": "store_const", "const": "1"} if self.metavar is None else {"metavar": self.metavar}
        return {"default": None, "help": f"{self.help} (or {self.variable})", **kind}


@dataclass(frozen=True, slots=True)
class Setting:
    """An option's value in this run, as text and parsed, and where it came from."""

    option: Option
    text: str | None
    value: Any
    source: str

    @property
    def given(self) -> bool:
        """Whether somebody asked for it."""
        return self.source != "default"

    def describe(self) -> str:
        """As the header and the report say it."""
        return f"{self.option.flag}={self.text} ({self.source})"


Settings = Mapping[str, Setting]


def worlds_of(text: str) -> tuple[int, ...]:
    """`N` or `N,N,...`, each at least 2."""
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ValueError(f"got {text!r}, expected N or N,N,...") from None
    if numbers[0] < 2:
        raise ValueError(f"got {text!r}, expected numbers from 2: world 1 always runs, as the baseline")
    return numbers


def seconds_of(text: str) -> float:
    """A positive, finite number of seconds."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= LONGEST:
        raise ValueError(f"got {text!r}, expected a positive number of seconds, at most {LONGEST:.0f}")
    return number


def whole_of(least: int) -> Callable[[str], int]:
    """A whole number from `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"got {text!r}, expected a whole number from {least}")
        return int(text)

    return parse


def one_of(*names: str) -> Callable[[str], str]:
    """One of some words."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"got {text!r}, expected one of {', '.join(names)}")
        return text

    return parse


def modes_of(text: str) -> tuple[str, ...]:
    """`both`, or one mode's name."""
    one_of("both", *RANK_MODES)(text)
    return RANK_MODES if text == "both" else (text,)


def path_of(text: str) -> str:
    """A path; not empty."""
    if not text:
        raise ValueError("got an empty path")
    return text


def switch_of(text: str) -> bool:
    """1 or 0."""
    return one_of("0", "1")(text) == "1"


OPTIONS: Final = (
    Option("--world", "H3_WORLD_SIZE", "N[,N]", None, worlds_of, "ranks; default: those of 2,4,6,8 that fit"),
    Option("--mode", "H3_MODE", "MODE", "both", modes_of, "both, ulysses or tensor", reduces=True),
    Option("--attention", "H3_ATTENTION", "NAME", "sdpa", one_of(*BACKENDS), "attention backend", reduces=True),
    Option("--linear", "H3_LINEAR", "KIND", "w4a16", one_of(*LINEAR_KINDS), "NVFP4 linears", GPU, reduces=True),
    Option("--checkpoint", "H3_MODEL_PATH", "PATH", None, path_of, "denoiser; default: synthesised", GPU),
    Option("--geometry", "H3_GEOMETRY", "WxHxF", "864x480x141", Geometry.parse, "clip to denoise", GPU, reduces=True),
    Option("--steps", "H3_STEPS", "N", "12", whole_of(1), "denoiser evaluations", GPU, reduces=True),
    Option("--seed", "H3_SEED", "N", "440420", whole_of(0), "seed of noise and embeddings", reduces=True),
    Option("--device", "H3_DEVICE", "NAME", "auto", one_of("auto", "cpu", "cuda"), "auto: what the tier runs on"),
    Option("--share-gpus", "H3_SHARE_GPUS", None, "0", switch_of, "several ranks on one GPU: no links tested", GPU),
    Option("--rank-timeout", "H3_RANK_TIMEOUT", "SECONDS", "120", seconds_of, "longest that ranks may take for a task"),
    Option("--report-dir", "H3_REPORT_DIR", "DIR", None, path_of, "where reports go; default for a tier: report"),
    Option("--gates", "H3_GATES", "FILE", None, path_of, "own gates instead of the shipped ones", ("gate",)),
    Option("--compare", "H3_COMPARE", "REPORT", None, path_of, "an earlier report: say what got worse since"),
)
PATHS: Final = ("--checkpoint", "--report-dir", "--gates", "--compare")
"""To be written `--opt=PATH`: pytest takes a bare existing path for a test path before it knows the option."""


def resolve(given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Setting]:
    """Every option's setting from the command line (`given`: name to text or None), the environment, or the default.

    Raises `pytest.UsageError` for a value that cannot be.
    """
    settings = {}
    for option in OPTIONS:
        text, source = given.get(option.name), "command line"
        if text is None and environ.get(option.variable, "") != "":
            text, source = environ[option.variable], option.variable
        if text is None:
            text, source = option.default, "default"
        try:
            value = None if text is None else option.parse(text)
        except ValueError as error:
            by = option.flag if source == "command line" else source
            raise pytest.UsageError(f"{by}: {error}") from None
        settings[option.name] = Setting(option, text, value, source)
    return settings


def check_for_tier(settings: Settings, tier: Tier) -> None:
    """Refuse options that `tier` would ignore. Raises `pytest.UsageError`."""
    for setting in settings.values():
        if setting.source == "command line" and tier.name not in setting.option.tiers:
            where = " and ".join(setting.option.tiers)
            raise pytest.UsageError(
                f"{setting.option.flag}: the {tier.name} tier would ignore it, it belongs to {where}; leave it out"
            )
    device = settings["device"].value
    if device not in ("auto", tier.device):
        raise pytest.UsageError(
            f"--device={device}: the {tier.name} tier runs on {tier.device}; leave it out, or choose another tier"
        )


def worlds_for(settings: Settings, device: str, visible_gpus: int) -> tuple[int, ...]:
    """The worlds of a run, ascending: those asked for, else those of 2, 4, 6, 8 that fit.

    A GPU tier can have a rank for each visible GPU (more with --share-gpus), a CPU tier one for each head of its
    test model. Raises `pytest.UsageError` where more are asked for, or none fits.
    """
    asked: tuple[int, ...] | None = settings["world"].value
    gpus = device == "cuda" and not settings["share_gpus"].value
    most = visible_gpus if gpus else TINY.num_attention_heads if device == "cpu" else max(DEFAULT_WORLDS)
    visible = "1 GPU is visible" if most == 1 else f"{most} GPUs are visible"
    what = visible if gpus else f"the test model has {most} heads"
    if most < 2:
        hint = "; --share-gpus runs several ranks on one, and tests no links" if most else ""
        raise pytest.UsageError(f"--world: {what}, and the smallest world is 2{hint}")
    if asked is None:
        return tuple(world for world in DEFAULT_WORLDS if world <= most)
    if asked[-1] > most:
        raise pytest.UsageError(f"--world: asked for {asked[-1]} ranks, {what}; ask for 2 to {most}")
    return asked


def reductions(settings: Settings, tier: Tier) -> list[str]:
    """What makes this run less than the tier's default profile, in words."""
    return [
        f"{option.name} {setting.text}"
        for setting in settings.values()
        for option in [setting.option]
        if option.reduces and tier.name in option.tiers and setting.value != option.parse(option.default)
    ]
