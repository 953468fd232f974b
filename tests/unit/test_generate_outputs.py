"""Where `python -m h3core generate` may write, and what it leaves when it cannot.

A pass means: an output that cannot be written is refused before any work, with exit code 2 and one line on stderr; no
failure leaves a partial or temporary file; and what came into being during a run is neither replaced nor a reason to
lose the run. Run: pytest tests/unit/test_generate_outputs.py
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from h3core import generate
from h3core.atomic import OutputError
from h3core.denoise import denoise
from tests.unit.generate_calls import (
    SMALL,
    Inputs,
    Outcome,
    check_refused,
    folder,
    listing,
    options,
    run,
    short_clips,
    written,
)

pytestmark = pytest.mark.usefixtures("process_state")

NAMES = [("latents", ".safetensors"), ("report", ".json")]


# --- after the work --------------------------------------------------------------------------------------------------


@short_clips
def test_force_replaces_older_output(inputs: Inputs, tmp_path: Path) -> None:
    for name in ("latents.safetensors", "report.json"):
        (tmp_path / name).write_text("older")
    assert run(*options(inputs, tmp_path, geometry=SMALL, force=True)).code == 0
    assert sorted(listing(tmp_path)) == ["latents.safetensors", "report.json"]
    assert json.loads((tmp_path / "report.json").read_text())["geometry"] == SMALL
    assert load_file(tmp_path / "latents.safetensors").keys() == {"video", "audio"}


@short_clips
def test_latents_that_are_not_finite_are_not_written(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        video, audio = denoise(*args, **options)
        audio[40, 7] = float("nan")
        return video, audio

    monkeypatch.setattr(generate, "denoise", spoilt)
    result = run(*options(inputs, tmp_path, geometry=SMALL))
    assert result.code == 2
    assert "NaN or infinite values; nothing was written" in result.err
    assert listing(tmp_path) == {}


@contextlib.contextmanager
def full_disk(case: str) -> Iterator[None]:
    """A disk on which no latents fit, which shows before, while or after they are written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        if case == "before":
            patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 5000, 5000))
        if case == "while":
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        if case == "after":
            patch.setattr(os, "fsync", no_space)
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


FULL = {"before": "not enough space", "while": "File too large", "after": "No space left on device"}
"""When a full disk shows, and what the system or the writer then says."""


@short_clips
@pytest.mark.parametrize("case", FULL)
@pytest.mark.parametrize("force", [None, True])
def test_a_full_disk_leaves_neither_output_nor_temporary_files(
    inputs: Inputs, tmp_path: Path, case: str, force: bool | None
) -> None:
    if force:
        (tmp_path / "latents.safetensors").write_text("older")
    before = listing(tmp_path)
    with full_disk(case), contextlib.suppress(OSError, OutputError):
        assert run(*options(inputs, tmp_path, geometry=SMALL, force=force)).code != 0
    assert listing(tmp_path) == before


@short_clips
@pytest.mark.parametrize("case", FULL)
def test_a_full_disk_is_one_line_and_code_2(inputs: Inputs, tmp_path: Path, case: str) -> None:
    with full_disk(case):
        outcome = run(*options(inputs, tmp_path, geometry=SMALL))
    warning, line = outcome.err.splitlines()
    assert warning.startswith("h3core: warning: geometry frames")
    check_refused(Outcome(outcome.code, outcome.out, f"{line}\n"), FULL[case])


@short_clips
@pytest.mark.parametrize("taken", ["", "-1"])
def test_files_that_appear_during_the_run_are_kept_and_the_run_is_not_lost(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    plain, crowded = folder(tmp_path / "plain"), folder(tmp_path / "crowded")
    assert run(*options(inputs, plain, geometry=SMALL)).code == 0
    theirs = {f"{stem}{end}{suffix}" for stem, suffix in NAMES for end in {"", taken}}

    def meanwhile(*args: Any, **chosen: Any) -> tuple[Tensor, Tensor]:
        for name in theirs:
            (crowded / name).write_text("somebody else's")
        return denoise(*args, **chosen)

    monkeypatch.setattr(generate, "denoise", meanwhile)
    outcome = run(*options(inputs, crowded, geometry=SMALL))
    assert outcome.code == 0, outcome.err
    latents, report = (f"{stem}-{2 if taken else 1}{suffix}" for stem, suffix in NAMES)
    found = listing(crowded)
    assert set(found) == theirs | {latents, report}
    assert {found[name] for name in theirs} == {b"somebody else's"}
    assert found[latents] == (plain / "latents.safetensors").read_bytes()
    assert json.loads((crowded / report).read_text())["geometry"] == SMALL
    first, second = outcome.out.splitlines()
    assert first.startswith(f"{crowded / latents}: video")
    assert second.startswith(f"{crowded / report}: 1 ranks")


# --- before any work --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["out", "report"])
def test_existing_output_is_refused_and_kept(inputs: Inputs, tmp_path: Path, option: str) -> None:
    older = written(tmp_path / "older", b"older")
    line = check_refused(run(*options(inputs, tmp_path, **{option: older})), r"older: exists; .*--force")
    assert str(older) in line
    assert listing(tmp_path) == {"older": b"older"}


@pytest.mark.parametrize("option", ["out", "report"])
@pytest.mark.parametrize("force", [None, True])
def test_a_folder_as_output_is_refused(inputs: Inputs, tmp_path: Path, option: str, force: bool | None) -> None:
    outcome = run(*options(inputs, tmp_path, **{option: folder(tmp_path / "there"), "force": force}))
    check_refused(outcome, "there: got a folder, expected a regular file")
    assert listing(tmp_path) == {"there": None}


@pytest.mark.parametrize("option", ["out", "report"])
def test_a_missing_output_folder_is_refused(inputs: Inputs, tmp_path: Path, option: str) -> None:
    path = tmp_path / "absent" / "file"
    check_refused(run(*options(inputs, tmp_path, **{option: path})), "got no folder .*absent, expected it to exist")
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("option", ["out", "report"])
def test_a_device_as_output_is_refused(inputs: Inputs, tmp_path: Path, option: str) -> None:
    outcome = run(*options(inputs, tmp_path, **{option: os.devnull, "force": True}))
    check_refused(outcome, "null: got a device, expected a regular file")
    assert not os.path.isfile(os.devnull)


@pytest.mark.parametrize("spelling", ["same", "same/../same", "link"])
def test_one_name_for_latents_and_report_is_refused(inputs: Inputs, tmp_path: Path, spelling: str) -> None:
    (tmp_path / "same").mkdir()
    (tmp_path / "link").symlink_to("same")
    one, other = tmp_path / "same" / "file", tmp_path / spelling / "file"
    check_refused(run(*options(inputs, tmp_path, out=one, report=other)), "--out and --report are both .*two names")
    assert listing(tmp_path / "same") == {}


@pytest.mark.parametrize("option", ["out", "report"])
@pytest.mark.parametrize("victim", ["checkpoint", "prompt_embeds"])
def test_no_force_replaces_an_input(inputs: Inputs, tmp_path: Path, option: str, victim: str) -> None:
    mine = Inputs(tmp_path / "model.safetensors", tmp_path / "prompt.safetensors", inputs.prompt)
    mine.checkpoint.write_bytes(inputs.checkpoint.read_bytes())
    mine.embeds.write_bytes(inputs.embeds.read_bytes())
    before = listing(tmp_path)
    target = mine.checkpoint if victim == "checkpoint" else mine.embeds
    outcome = run(*options(mine, tmp_path, **{option: target, "force": True}))
    assert listing(tmp_path).get(target.name) == before[target.name], "an input was overwritten"
    check_refused(outcome, target.name)


@pytest.mark.skipif(not hasattr(os, "setresuid"), reason="needs a system on which root can become nobody")
@pytest.mark.parametrize("option", ["out", "report"])
def test_an_output_folder_that_cannot_be_written_is_refused_before_any_work(
    inputs: Inputs, tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    monkeypatch.setattr(generate, "run", lambda *args: ran.append(args))
    root = os.getuid() == 0
    with tempfile.TemporaryDirectory() as name:
        # Root may write anywhere, so it becomes nobody, who may not enter pytest's folders: all of it lies here.
        place = Path(name)
        place.chmod(0o755)
        mine = Inputs(place / "model.safetensors", place / "prompt.safetensors", inputs.prompt)
        mine.checkpoint.write_bytes(inputs.checkpoint.read_bytes())
        mine.embeds.write_bytes(inputs.embeds.read_bytes())
        closed, opened = folder(place / "closed"), folder(place / "opened")
        closed.chmod(0o555)
        opened.chmod(0o777)
        try:
            if root:
                os.setresuid(65534, 65534, 0)
            outcome = run(*options(mine, opened, **{option: closed / "file"}))
        finally:
            if root:
                os.setresuid(0, 0, 0)
            closed.chmod(0o755)
        assert ran == [], "the work was done before the folder was looked at"
        check_refused(outcome, str(closed))
        assert listing(opened) == listing(closed) == {}
