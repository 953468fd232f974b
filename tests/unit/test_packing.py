"""From a clip to a packed sequence: row counts, positions, patches, segments and noise, against facts and diffusers.

A pass means: every clip has the rows of the model's documentation and the positions and patches that diffusers 0.42.1
computes, to the bit; segments cut by rank still name every row once; and a seed draws one noise, however it is cut.
Run: pytest tests/unit/test_packing.py
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from h3core.config import H3, TINY, H3Config
from h3core.denoise import denoise
from h3core.packing import (
    AUDIO,
    TEXT,
    VIDEO,
    Geometry,
    LatentShape,
    Noise,
    PackedSequence,
    Segment,
    audio_rows_to_latents,
    clip_segments,
    patchify,
    snap_frames,
    unpatchify,
)
from h3core.partition import Span, split
from h3core.qualify.checks.compare import Identical, compare
from h3core.schedule import Schedules

PATCH = (1, 2, 2)


def clip(text: str) -> Geometry:
    """A geometry, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Geometry.parse(text)


def packed(text: str, text_rows: int) -> PackedSequence:
    return PackedSequence.build(clip(text).latents, text_rows, PATCH)


# --- sizes -------------------------------------------------------------------------------------------------------

# clip, seconds, latents (frames, height, width), grid, rows a frame, video rows, audio rows, total with 200 text rows
WORKED = [
    ("864x480x141", 5.875, (42, 30, 54), (42, 15, 27), 405, 17_010, 470, 17_680),
    ("1344x768x243", 10.125, (72, 48, 84), (72, 24, 42), 1008, 72_576, 810, 73_586),
    ("1344x768x124", 5.167, (37, 48, 84), (37, 24, 42), 1008, 37_296, 414, 37_910),
    ("864x480x124", 5.167, (37, 30, 54), (37, 15, 27), 405, 14_985, 414, 15_599),
    ("1344x768x362", 15.083, (107, 48, 84), (107, 24, 42), 1008, 107_856, 1206, 109_262),
]


@pytest.mark.parametrize("row", WORKED, ids=[row[0] for row in WORKED])
def test_a_clip_has_the_documented_rows(row: tuple[Any, ...]) -> None:
    name, seconds, latents, grid, rows_per_frame, video_rows, audio_rows, total = row
    geometry = Geometry.parse(name)
    assert str(geometry) == name
    assert round(geometry.seconds, 3) == seconds
    shape = geometry.latents
    assert (shape.frames, shape.height, shape.width) == latents
    assert shape.grid(PATCH) == grid
    assert grid[1] * grid[2] == rows_per_frame
    sequence = PackedSequence.build(shape, 200, PATCH)
    assert sequence.text == Span(0, 200)
    assert sequence.audio == Span(200, 200 + audio_rows)
    assert sequence.video == Span(200 + audio_rows, total)
    assert (sequence.audio.size, sequence.video.size, sequence.rows) == (audio_rows, video_rows, total)


def test_audio_latents_are_forty_a_second_rounded() -> None:
    # Worked by hand: frames x 5/3 ends in 0, 1/3 or 2/3.
    by_hand = {5: 8, 22: 37, 107: 178, 124: 207, 141: 235, 158: 263, 175: 292, 243: 405, 362: 603}
    assert {frames: clip(f"32x32x{frames}").latents.audio for frames in by_hand} == by_hand


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        (1, 5),
        (4, 5),
        (6, 22),
        (22, 22),
        (106, 107),
        (108, 124),
        (140, 141),
        (240, 243),
        (241, 243),
        (244, 260),
        (361, 362),
    ],
)
def test_frames_are_snapped_up_to_the_grid(asked: int, used: int) -> None:
    assert snap_frames(asked) == used
    assert clip(f"64x64x{asked}").frames == used


@given(st.integers(1, 100_000))
def test_snapping_gives_the_next_frame_count_on_the_grid(frames: int) -> None:
    snapped = snap_frames(frames)
    assert snapped % 17 == 5
    assert frames <= snapped < max(frames, 5) + 17
    assert snap_frames(snapped) == snapped


def test_a_snapped_frame_count_is_announced() -> None:
    with pytest.warns(UserWarning, match=r"geometry frames: 241 is not 17n \+ 5; using 243") as seen:
        geometry = Geometry(1344, 768, 241)
    assert len(seen) == 1
    assert geometry == Geometry(1344, 768, 243)
    assert str(geometry) == "1344x768x243"
    assert seen[0].filename == __file__, "the warning should point at the caller"


@pytest.mark.parametrize(("frames", "seconds"), [(90, "3.75"), (379, "15.79")])
def test_a_length_outside_the_released_range_is_announced(frames: int, seconds: str) -> None:
    with pytest.warns(UserWarning, match=rf"{frames} \({seconds} s\) is outside the 107 to 362 frames"):
        Geometry(864, 480, frames)


@pytest.mark.parametrize("frames", [107, 141, 362])
def test_a_released_length_is_taken_in_silence(frames: int) -> None:
    # The suite turns warnings into errors.
    assert Geometry(864, 480, frames).frames == frames


@pytest.mark.parametrize(
    ("size", "name", "got", "neighbours"),
    [
        ((870, 480), "width", 870, (864, 896)),
        ((880, 480), "width", 880, (864, 896)),
        ((864, 479), "height", 479, (448, 480)),
        ((864, 400), "height", 400, (384, 416)),
        ((16, 480), "width", 16, (32, 64)),
        ((0, 480), "width", 0, (32, 64)),
        ((864, -32), "height", -32, (32, 64)),
    ],
)
def test_a_canvas_off_the_grid_is_refused_with_its_neighbours(
    size: tuple[int, int], name: str, got: int, neighbours: tuple[int, int]
) -> None:
    below, above = neighbours
    with pytest.raises(ValueError) as refused:
        Geometry(*size, 141)
    text = str(refused.value)
    assert f"geometry {name}: got {got}, expected a positive multiple of 32 pixels" in text
    assert f"try {below} or {above}" in text
    for mended in neighbours:
        Geometry(**{"width": 864, "height": 480, "frames": 141, name: mended})


def test_no_frames_are_refused() -> None:
    with pytest.raises(ValueError, match="geometry frames: got 0, expected at least 1"):
        Geometry(864, 480, 0)


MISSPELT = "|864x480|864x480x141x1|864X480X141|864*480*141|864x480x|x480x141|864.0x480x141|-864x480x141| 864x480x141"
MISSPELT += "|864x480x141\n|864 x 480 x 141|default"


@pytest.mark.parametrize("text", MISSPELT.split("|"))
def test_a_misspelt_geometry_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError) as refused:
        Geometry.parse(text)
    assert str(refused.value) == f"geometry: got {text!r}, expected WIDTHxHEIGHTxFRAMES, such as 864x480x141"


@pytest.mark.parametrize("sizes", [(0, 2, 2, 1), (1, 0, 2, 1), (1, 2, 0, 1), (1, 2, 2, 0)])
def test_latents_without_a_size_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"latents: got .*expected every size to be at least 1"):
        LatentShape(*sizes)


@pytest.mark.parametrize(("shape", "patch"), [((3, 5, 4), PATCH), ((3, 4, 5), PATCH), ((3, 4, 4), (2, 2, 2))])
def test_latents_that_the_patch_does_not_divide_are_refused(
    shape: tuple[int, int, int], patch: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError) as refused:
        PackedSequence.build(LatentShape(*shape, 1), 3, patch)
    assert str(shape) in str(refused.value)
    assert str(patch) in str(refused.value)


@pytest.mark.parametrize("rows", [0, -1])
def test_a_sequence_without_text_is_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=f"text rows: got {rows}, expected at least 1"):
        packed("64x64x22", rows)


# --- positions ---------------------------------------------------------------------------------------------------

CLIPS = ["864x480x141", "480x864x124", "1344x768x107", "768x768x175", "96x64x22", "32x1024x141"]
TEXT_ROWS = [1, 19, 200, 537]


@pytest.fixture(scope="module")
def layout() -> Any:
    """diffusers' own layout of a packed sequence."""
    module = pytest.importorskip("diffusers.modular_pipelines.minimax_h3.before_denoise")

    def build(shape: LatentShape, text_rows: int) -> dict[str, torch.Tensor]:
        positions, tags, video, audio, text, conditions, _ = module.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            torch.ones(text_rows, dtype=torch.long),
            shape.frames,
            shape.height,
            shape.width,
            shape.audio,
            PATCH,
            audio_channels=2,
            audio_tag=2,
            video_tag=0,
        )
        assert conditions == 0
        return {"positions": positions, "tags": tags, "video": video, "audio": audio, "text": text}

    return SimpleNamespace(build=build, patchify=module.patchify_video_latents)


@pytest.mark.parametrize("text_rows", TEXT_ROWS)
@pytest.mark.parametrize("name", CLIPS)
def test_positions_equal_diffusers_in_fp32_and_in_fp64(layout: Any, name: str, text_rows: int) -> None:
    sequence = packed(name, text_rows)
    theirs = layout.build(sequence.latents, text_rows)["positions"]
    compare("positions, as RoPE reads them", sequence.positions.float(), theirs.float(), Identical())
    compare("positions, as they are built", sequence.positions, theirs, Identical())
    assert sequence.positions.dtype == torch.float64


@pytest.mark.parametrize("name", CLIPS)
def test_rows_of_each_modality_lie_where_diffusers_has_them(layout: Any, name: str) -> None:
    sequence = packed(name, 19)
    theirs = layout.build(sequence.latents, 19)
    for kind in ("text", "audio", "video"):
        assert theirs[kind].tolist() == list(range(*getattr(sequence, kind)))
    assert torch.equal(tags_of(sequence.segments, sequence.rows), theirs["tags"])


def test_positions_of_the_default_clip_have_the_documented_values() -> None:
    sequence = packed("864x480x141", 200)
    positions = sequence.positions
    text, audio, video = (positions[slice(*span)] for span in (sequence.text, sequence.audio, sequence.video))
    assert text.tolist() == [[i, 0, 0] for i in range(200)]

    left, right = audio.view(2, 235, 3)
    for channel in (left, right):
        assert channel[:, 0].tolist() == [200.0 + a for a in range(235)]
        assert not channel[:, 1].any()
    grid = video.view(42, 15, 27, 3)
    w_first, w_last = grid[0, 0, 0, 2], grid[0, 0, -1, 2]
    assert (left[:, 2] == w_first).all()
    assert (right[:, 2] == w_last).all()

    times = grid[:, 0, 0, 0]
    documented = [200, 201.667, 208.333, 215, 221.667, 228.333, 230]
    assert times[:7].tolist() == pytest.approx(documented, abs=5e-4)
    assert times[-1].item() == pytest.approx(428.333, abs=5e-4)
    assert grid[0, 0, 0, 1].item() == pytest.approx(4.074304, abs=5e-7)
    assert grid[0, -1, 0, 1].item() == pytest.approx(26.335603, abs=5e-7)
    assert w_first.item() == pytest.approx(-5.466253, abs=5e-7)
    assert w_last.item() == pytest.approx(35.876160, abs=5e-7)
    for axis in (grid[0, :, 0, 1], grid[0, 0, :, 2]):
        assert axis.diff().tolist() == pytest.approx([1.590093] * (len(axis) - 1), abs=1e-6)


@pytest.mark.parametrize("name", CLIPS)
def test_positions_follow_the_closed_form(name: str) -> None:
    sequence = packed(name, 23)
    shape = sequence.latents
    frames, rows, columns = shape.grid(PATCH)
    side = float(np.sqrt(shape.height * shape.width))
    k, r, q = (np.arange(n, dtype=np.float64) for n in (frames, rows, columns))
    pixel_frames = 17 * (k // 5) + np.where(k % 5 == 0, 0, 1 + 4 * (k % 5 - 1))
    t = 23 + 5 / 3 * pixel_frames
    h = 16 - 16 * shape.height / side + 64 * r / side
    w = 16 - 16 * shape.width / side + 64 * q / side
    expected = np.stack(np.meshgrid(t, h, w, indexing="ij"), axis=-1).reshape(-1, 3)
    ours = sequence.positions[slice(*sequence.video)].numpy()
    assert np.abs(ours - expected).max() < 1e-11
    assert np.array_equal(ours.astype(np.float32), expected.astype(np.float32))


# --- patches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch", [PATCH, (2, 2, 2), (1, 1, 1), (1, 4, 2)], ids=str)
def test_patches_equal_diffusers_and_come_back_whole(layout: Any, patch: tuple[int, int, int]) -> None:
    latents = torch.randn(1, 24, 4, 8, 6, generator=torch.Generator().manual_seed(1))
    rows = patchify(latents, patch)
    compare("rows", rows, layout.patchify(latents, patch), Identical())
    compare("latents", unpatchify(rows, LatentShape(4, 8, 6, 1), patch), latents, Identical())
    assert rows.is_contiguous()


def test_a_patch_lies_at_its_documented_place() -> None:
    frames, height, width = 2, 4, 6
    latents = torch.arange(24 * frames * height * width, dtype=torch.float32).view(1, 24, frames, height, width)
    rows = patchify(latents, PATCH)
    assert rows.shape == (2 * 2 * 3, 96)
    for frame, row, column, channel, dy, dx in [
        (0, 0, 0, 0, 0, 0),
        (1, 0, 2, 7, 1, 0),
        (1, 1, 1, 23, 0, 1),
        (0, 1, 2, 3, 1, 1),
    ]:
        value = latents[0, channel, frame, 2 * row + dy, 2 * column + dx]
        assert rows[(frame * 2 + row) * 3 + column, channel * 4 + dy * 2 + dx] == value


def test_audio_rows_are_left_then_right() -> None:
    rows = torch.arange(2 * 5 * 32, dtype=torch.float32).view(10, 32)
    latents = audio_rows_to_latents(rows)
    assert latents.shape == (2, 32, 5)
    assert torch.equal(latents[0].T, rows[:5])
    assert torch.equal(latents[1].T, rows[5:])
    assert latents.is_contiguous()


# --- segments ----------------------------------------------------------------------------------------------------


def tags_of(segments: tuple[Segment, ...], rows: int) -> torch.Tensor:
    """The tag of each row; -1 where no segment has it. A row in two segments is an error."""
    tags = torch.full((rows,), -1)
    for segment in segments:
        part = slice(*segment.rows)
        assert (tags[part] == -1).all(), "two segments share a row"
        tags[part] = segment.tag
    return tags


def test_a_clip_from_text_has_three_segments() -> None:
    assert packed("864x480x141", 200).segments == (
        Segment(Span(0, 200), TEXT, "video"),
        Segment(Span(200, 670), AUDIO, "audio"),
        Segment(Span(670, 17_680), VIDEO, "video"),
    )
    assert (VIDEO, TEXT, AUDIO) == (0, 1, 2), "the order of AdaLN's parameters on disk"


def test_segments_are_clipped_and_rebased_by_hand() -> None:
    segments = packed("864x480x141", 200).segments
    assert clip_segments(segments, Span(0, 100)) == (Segment(Span(0, 100), TEXT, "video"),)
    assert clip_segments(segments, Span(150, 700)) == (
        Segment(Span(0, 50), TEXT, "video"),
        Segment(Span(50, 520), AUDIO, "audio"),
        Segment(Span(520, 550), VIDEO, "video"),
    )
    assert clip_segments(segments, Span(200, 670)) == (Segment(Span(0, 470), AUDIO, "audio"),)
    assert clip_segments(segments, Span(670, 17_680)) == (Segment(Span(0, 17_010), VIDEO, "video"),)


@given(
    text_rows=st.integers(1, 60),
    frames=st.integers(1, 6),
    height=st.integers(1, 3),
    width=st.integers(1, 3),
    audio=st.integers(1, 40),
    ranks=st.integers(1, 9),
)
def test_clipped_segments_of_all_ranks_name_every_row_once(
    text_rows: int, frames: int, height: int, width: int, audio: int, ranks: int
) -> None:
    sequence = PackedSequence.build(LatentShape(frames, 2 * height, 2 * width, audio), text_rows, PATCH)
    whole = tags_of(sequence.segments, sequence.rows)
    assert torch.equal(whole, torch.tensor([1] * text_rows + [2] * 2 * audio + [0] * frames * height * width))
    ranks = min(ranks, sequence.rows)
    own = [(rows, clip_segments(sequence.segments, rows)) for rows in split(sequence.rows, ranks)]
    assert torch.equal(torch.cat([tags_of(segments, rows.size) for rows, segments in own]), whole)
    for rows, segments in own:
        assert all(segment.rows.size for segment in segments), "an empty segment is left"
        assert sum(segment.rows.size for segment in segments) == rows.size
        assert all(segment.clock == ("audio" if segment.tag == AUDIO else "video") for segment in segments)


# --- noise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TINY, H3], ids=["tiny", "h3"])
def test_noise_is_drawn_as_video_latents_and_then_as_audio_rows(config: H3Config) -> None:
    shape = LatentShape(7, 6, 8, 37)
    generator = torch.Generator().manual_seed(440_420)
    video = torch.randn(1, 24, 7, 6, 8, generator=generator)
    audio = torch.randn(74, 32, generator=generator)
    noise = Noise.draw(config, shape, 440_420)
    compare("video noise", unpatchify(noise.video, shape, PATCH), video, Identical())
    compare("audio noise", noise.audio, audio, Identical())
    assert noise.video.shape == (7 * 3 * 4, 96)


def test_another_seed_draws_other_noise_and_the_global_generator_is_left_alone() -> None:
    shape = LatentShape(2, 4, 4, 8)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (Noise.draw(TINY, shape, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.video, again.video)
    assert torch.equal(first.audio, again.audio)
    assert not torch.equal(first.video, other.video)
    assert not torch.equal(first.audio, other.audio)


class Idle:
    """A denoiser of one rank that predicts no movement; it owns the rows that a real one would."""

    dtype = torch.float32

    def __init__(self, sequence: PackedSequence, rows: Span) -> None:
        self.video = sequence.video.clip(rows).shifted(-sequence.video.start)
        self.audio = sequence.audio.clip(rows).shifted(-sequence.audio.start)
        self.mode = SimpleNamespace(gather=lambda own, modality: own)

    def begin(self, sequence: PackedSequence, prompt_embeds: torch.Tensor) -> Any:
        return self

    def velocity(self, request: Any, video: torch.Tensor, audio: torch.Tensor, evaluation: Any) -> Any:
        return torch.zeros_like(video), torch.zeros_like(audio)


@pytest.mark.parametrize("ranks", range(1, 10))
def test_a_seed_starts_every_number_of_ranks_from_the_same_rows(ranks: int) -> None:
    sequence = PackedSequence.build(LatentShape(7, 4, 6, 37), 19, PATCH)
    noise = Noise.draw(TINY, sequence.latents, 3)
    starts: list[Any] = []
    for rows in split(sequence.rows, ranks):
        rank: Any = Idle(sequence, rows)
        denoise(rank, sequence, torch.zeros(19, 128), noise, Schedules.build(1), on_step=starts.append)
    assert len(starts) == ranks
    compare("video rows of all ranks", torch.cat([step.video for step in starts]), noise.video, Identical())
    compare("audio rows of all ranks", torch.cat([step.audio for step in starts]), noise.audio, Identical())
