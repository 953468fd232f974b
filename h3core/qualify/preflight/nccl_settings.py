"""Settings that change NCCL: its variables, and its configuration files, which change it with no variable showing.

As in NCCL's src/misc/param.cc (2.30): the file NCCL_CONF_FILE names, or else .nccl.conf in the home folder of the
password file ($HOME is not looked at), and then /etc/nccl.conf. A line is NAME=VALUE with nothing trimmed, "#" is a
comment in the first column alone, and the first to set a name wins: environment, the user's file, /etc.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3core.qualify.preflight.environment import environment_facts, shown
from h3core.qualify.preflight.finding import Finding, NotMeasured, Reading, attempt, not_measured, ok

VARIABLES: Final = "NCCL variables"
FILES: Final = "NCCL files"

HARMLESS: Final = ("NCCL_DEBUG", "NCCL_CONF_FILE")
"""Beginnings of names that change what NCCL says and reads, not what it does."""
LABELS: Final = ("NCCL_VERSION",)
"""Set by container images to say what they hold (seen: 2.28.3-1 beside a loaded 2.28.9); NCCL does not read them."""


@dataclass(frozen=True, slots=True)
class ConfFile:
    """A configuration file that NCCL looks for. `settings` is None where there is no such file."""

    path: str
    settings: Reading[tuple[tuple[str, str], ...] | None]


def read_conf_files(root: Path, environ: Mapping[str, str], home: Path | None) -> tuple[ConfFile, ...]:
    """The files that NCCL would read, in its order; `home` is the home folder of the password file."""
    named = environ.get("NCCL_CONF_FILE")
    paths = [named] if named else [str(home / ".nccl.conf")] if home else []
    return tuple(_read(root, path) for path in (*paths, "/etc/nccl.conf"))


def _read(root: Path, path: str) -> ConfFile:
    def settings() -> tuple[tuple[str, str], ...] | None:
        try:
            return parse_conf((root / path.lstrip("/")).read_text(errors="replace"))
        except (FileNotFoundError, NotADirectoryError):
            return None

    return ConfFile(path, attempt(settings))


def parse_conf(text: str) -> tuple[tuple[str, str], ...]:
    """Names and values, as NCCL takes them."""
    lines = (line for line in text.splitlines() if not line.startswith("#") and "=" in line)
    return tuple((name, value) for name, _, value in (line.partition("=") for line in lines))


def judge_variables(environ: Mapping[str, str]) -> Finding:
    """Variables that are set: the run is judged with them."""
    facts = environment_facts(environ)
    names = sorted(name for name in facts if name.startswith("NCCL_") and name not in LABELS)
    if not names:
        return ok(VARIABLES, "none is set")
    got = ", ".join(f"{name}={shown(name, environ[name])}" for name in names)
    if all(name.startswith(HARMLESS) for name in names):
        return ok(VARIABLES, got)
    return Finding(
        VARIABLES,
        "warning",
        got,
        "NCCL's own choices",
        "unset what is not meant: the result holds for a run with these settings",
        "stack",
    )


def judge_conf_files(files: Iterable[ConfFile], environ: Mapping[str, str]) -> Finding:
    """What configuration files set."""
    files = list(files)
    named = environ.get("NCCL_CONF_FILE")
    said, unread, seen = [], [], set(environ)
    for file in files:
        if isinstance(file.settings, NotMeasured):
            unread.append(f"{file.path}: {file.settings.reason}")
            continue
        for name, value in file.settings or ():
            loses = " (another value wins)" if name in seen else ""
            said.append(f"{name}={shown(name, value)} in {file.path}{loses}")
            seen.add(name)
    missing = named is not None and any(file.path == named and file.settings is None for file in files)
    if said or missing:
        if missing:
            said.append(f"NCCL_CONF_FILE names {named}, which is not there")
        return Finding(
            FILES,
            "warning",
            "; ".join(said + unread),
            "no configuration file, or one that is meant",
            "the result holds for a run with these settings, which no variable shows; move the file away, or keep it",
            "stack",
        )
    if unread:
        return not_measured(FILES, "; ".join(unread))
    there = [file.path for file in files if file.settings is not None]
    absent = [file.path for file in files if file.settings is None]
    return ok(FILES, "; ".join([f"{path} sets nothing" for path in there] + [f"no {path}" for path in absent]))
