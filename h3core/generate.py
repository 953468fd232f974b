"""`python -m h3core generate`: prompt embedding to latents and a report, on one process or under torchrun.

Everything that can be refused is refused before a process group is joined or a GPU is touched, and every
rank ends when one of them cannot go on.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from h3core import __version__
from h3core.atomic import check_space, check_target, free_name, write_text
from h3core.attention import attention_backend
from h3core.checkpoint import DenoiserReader, TensorSpec
from h3core.checkpoint.writer import write_file
from h3core.comm import Comm
from h3core.config import H3Config
from h3core.denoise import Step, denoise
from h3core.denoiser import Denoiser
from h3core.launch import Launch, joined, pick_device
from h3core.linear import Linear
from h3core.packing import Geometry, Noise, PackedSequence, audio_rows_to_latents, unpatchify
from h3core.parallel import REDUCE_DTYPES, Mode, build_mode, check_mode, shard_for
from h3core.partition import Partition, Shard
from h3core.schedule import Schedules
from h3core.weights import DenoiserWeights, held_bytes

EMBEDS = "prompt_embeds"
MOST_ROWS = 1 << 21
"""Nineteen times the longest released clip: beyond it, a slip of the keyboard."""
DTYPE = torch.bfloat16
"""The residual stream's dtype: fp16 overflows in this model."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request, as the command line gives it."""

    checkpoint: Path
    prompt_embeds: Path
    out: Path
    report: Path
    geometry: Geometry
    evaluations: int
    seed: int
    mode: str
    attention: str
    linear: str
    reduce_dtype: str
    device: str
    force: bool


def load_prompt_embeds(path: Path, config: H3Config) -> Tensor:
    """Read `prompt_embeds` (L, text_dim) or (1, L, text_dim) from a safetensors file.

    Raises `ValueError` for a file, name, shape, dtype or value that does not fit.
    """
    if not path.is_file():
        raise ValueError(f"prompt embedding {path}: got no such file, expected a safetensors file with {EMBEDS!r}")
    try:
        tensors = load_file(path)
    except Exception as error:
        raise ValueError(f"prompt embedding {path}: not a safetensors file ({error})") from error
    if EMBEDS not in tensors:
        raise ValueError(f"prompt embedding {path}: got tensors {sorted(tensors)}, expected {EMBEDS!r}")
    embeds = tensors[EMBEDS]
    if embeds.ndim == 3 and embeds.shape[0] == 1:
        embeds = embeds[0]
    if embeds.ndim != 2 or embeds.shape[0] < 1 or embeds.shape[1] != config.text_dim:
        raise ValueError(f"{EMBEDS}: got shape {tuple(embeds.shape)}, expected (tokens, {config.text_dim})")
    if embeds.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(f"{EMBEDS}: got {embeds.dtype}, expected a floating-point dtype of 16 bits or more")
    if not bool(torch.isfinite(embeds.to(DTYPE)).all()):
        raise ValueError(f"{EMBEDS}: got NaN or infinite values, expected finite ones; encode the prompt again")
    return embeds


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job whose every input has been checked."""

    reader: DenoiserReader
    embeds: Tensor
    sequence: PackedSequence
    schedules: Schedules
    device: torch.device


def prepare(job: Job, launch: Launch) -> Prepared:
    """Check everything that needs neither peers nor GPU work. Raises `ValueError` (got, expected, what to do)."""
    check_mode(job.mode, launch.world)
    attention_backend(job.attention)
    Linear(job.linear)
    schedules = Schedules.build(job.evaluations)
    device = pick_device(job.device, launch)
    if job.reduce_dtype not in REDUCE_DTYPES:
        raise ValueError(f"reduce_dtype: got {job.reduce_dtype!r}, expected one of {', '.join(REDUCE_DTYPES)}")
    if not -(2**63) <= job.seed < 2**64:
        raise ValueError(f"seed: got {job.seed}, expected an integer of 64 bits")
    if launch.rank == 0:
        check_outputs(job)
    reader = DenoiserReader(job.checkpoint)
    embeds = load_prompt_embeds(job.prompt_embeds, reader.config)
    sequence = PackedSequence.build(job.geometry.latents, embeds.shape[0], reader.config.patch_size)
    if sequence.rows > MOST_ROWS:
        raise ValueError(
            f"geometry {job.geometry}: got {sequence.rows:,} rows, expected at most {MOST_ROWS:,}; ask for less"
        )
    if launch.rank == 0:
        values = (
            sequence.video.size * reader.config.video_row_dim + sequence.audio.size * reader.config.audio_in_channels
        )
        check_space(job.out, 4 * values)
    Partition.build(reader.config, sequence.rows, launch.world)
    shard_for(job.mode, reader.config, launch.rank, launch.world)
    return Prepared(reader, embeds, sequence, schedules, device)


def check_outputs(job: Job) -> None:
    """Refuse outputs that cannot be written, or that are one of the inputs. Raises `ValueError`."""
    for path in (job.out, job.report):
        check_target(path, force=job.force)
    if job.out.resolve() == job.report.resolve():
        raise ValueError(f"--out and --report are both {job.out}; choose two names")
    inputs = [job.prompt_embeds.resolve(), job.checkpoint.resolve()]
    for path in (job.out, job.report):
        if path.resolve() in inputs or job.checkpoint.resolve() in path.resolve().parents:
            raise ValueError(f"{path}: is an input, or lies in the checkpoint's folder; choose another name")


def generate(job: Job) -> int:
    """Run the job on this rank; returns the process's exit code. Wrong input is one line on stderr and code 2."""
    launch = Launch.from_environment()
    prepared, problem, device = None, "", torch.device("cpu")
    try:
        prepared = prepare(job, launch)
        device = prepared.device
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
        problem = str(error)
    if launch.world == 1 and problem:
        return refuse([problem], launch)
    if launch.world > 1 and "MASTER_ADDR" not in os.environ:
        return refuse(["launch: got RANK without MASTER_ADDR; start with torchrun"] * launch.world, launch)
    if device.type == "cpu":
        torch.set_num_threads(1)  # the number of threads decides bits: so one, at every world size
    with joined(launch, device) as comm:
        problems = comm.gather_text(problem)
        if any(problems):
            return refuse(problems, launch)
        if prepared is None:
            raise RuntimeError("no problem was reported, but nothing was prepared")
        different = differences(comm.gather_text(json.dumps(request_of(job, prepared))))
        if different:
            return refuse([different] * launch.world, launch)
        loaded, problem = None, ""
        try:
            loaded = load(job, comm, prepared)
        except (ValueError, OSError) as error:
            problem = str(error)
        problems = comm.gather_text(problem)
        if loaded is None or any(problems):
            return refuse(problems, launch)
        with torch.inference_mode():
            problems = comm.gather_text(run(job, launch, comm, prepared, loaded))
        return refuse(problems, launch) if any(problems) else 0


def request_of(job: Job, prepared: Prepared) -> dict[str, str]:
    """Everything that decides the latents, as text: what all ranks must have in common."""
    tensors = sorted((name, info.dtype, info.shape) for name, info in prepared.reader.checkpoint.tensors.items())
    return {
        "geometry": str(job.geometry),
        "steps": str(job.evaluations),
        "seed": str(job.seed),
        "mode": job.mode,
        "attention": job.attention,
        "linear": job.linear,
        "reduce-dtype": job.reduce_dtype,
        "sha256 of the prompt embedding": hashlib.sha256(job.prompt_embeds.read_bytes()).hexdigest(),
        "sha256 of the checkpoint's tensor list": hashlib.sha256(repr(tensors).encode()).hexdigest(),
        "h3core": __version__,
        "torch": torch.__version__,
    }


def differences(requests: list[str]) -> str:
    """What ranks that were started with different requests do not have in common; nothing where they agree.

    Ranks that disagree would otherwise hang in a collective, or mix two requests into one result without a word.
    """
    asked = [json.loads(text) for text in requests]
    found = []
    for field in asked[0]:
        values = [request[field] for request in asked]
        if len(set(values)) > 1:
            ranks = {value: [r for r, other in enumerate(values) if other == value] for value in dict.fromkeys(values)}
            found.append(f"{field}: " + ", ".join(f"{value} on ranks {where}" for value, where in ranks.items()))
    if not found:
        return ""
    return f"the ranks were started with different requests: {'; '.join(found)}. Give all of them the same"


def refuse(problems: list[str], launch: Launch) -> int:
    """Print each distinct problem once, from rank 0. Returns exit code 2."""
    if launch.rank == 0:
        for text in dict.fromkeys(filter(None, problems)):
            ranks = [rank for rank, other in enumerate(problems) if other == text]
            where = "" if len(ranks) == len(problems) else f" (rank {', '.join(map(str, ranks))})"
            print(f"h3core: error: {' '.join(text.split())}{where}", file=sys.stderr)
    return 2


@dataclass(frozen=True, slots=True)
class Loaded:
    """One rank's shard on its device, how long it took to get there, and the way through a block."""

    mode: Mode
    shard: Shard
    weights: DenoiserWeights
    seconds: float


def load(job: Job, comm: Comm, prepared: Prepared) -> Loaded:
    """Compare split plans with the other ranks, then read this rank's shard.

    Raises `ValueError` for plans that differ and for impossible values, `OSError` for a failing disk.
    """
    mode = build_mode(
        job.mode,
        prepared.reader.config,
        prepared.sequence.rows,
        comm,
        attention=job.attention,
        linear=job.linear,
        reduce_dtype=job.reduce_dtype,
    )
    started = time.perf_counter()
    shard = shard_for(job.mode, prepared.reader.config, comm.rank, comm.world)
    weights = prepared.reader.load(shard=shard, dtype=DTYPE, device=prepared.device)
    return Loaded(mode, shard, weights, time.perf_counter() - started)


def run(job: Job, launch: Launch, comm: Comm, prepared: Prepared, loaded: Loaded) -> str:
    """Denoise and gather; rank 0 writes latents and report. Returns what kept it from writing, or nothing."""
    reader, sequence, device = prepared.reader, prepared.sequence, prepared.device
    mode = loaded.mode
    denoiser = Denoiser(reader.config, loaded.weights, mode, DTYPE)
    noise = Noise.draw(reader.config, sequence.latents, job.seed)
    comm.reset()
    seconds = [time.perf_counter()]
    bar = tqdm(total=job.evaluations, unit="step", disable=launch.rank != 0 or not sys.stderr.isatty())

    def tick(_: Step) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter())
        bar.update()

    with bar:
        video, audio = denoise(denoiser, sequence, prepared.embeds.to(device), noise, prepared.schedules, on_step=tick)
    facts = {
        "rank": comm.rank,
        "device": device_name(device),
        "rows": mode.rows.size,
        "heads": loaded.shard.heads.size,
        "weight_bytes": held_bytes(loaded.weights),
        "checkpoint_bytes_read": reader.bytes_read,
        "load_s": loaded.seconds,
        "peak_device_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "step_s": [after - before for before, after in pairwise(seconds)],
        "transport": comm.report(),
    }
    ranks = [json.loads(text) for text in comm.gather_text(json.dumps(facts))]
    if launch.rank != 0:
        return ""
    if not (bool(torch.isfinite(video).all()) and bool(torch.isfinite(audio).all())):
        return "the latents hold NaN or infinite values; nothing was written. Check the checkpoint's sha256 and the GPU"
    try:
        write(job, prepared, video.cpu(), audio.cpu(), ranks)
    except (ValueError, OSError) as error:  # the disk filled up, or the folder went away
        return str(error)
    return ""


def device_name(device: torch.device) -> str:
    """The GPU's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def write(job: Job, prepared: Prepared, video: Tensor, audio: Tensor, ranks: list[dict[str, Any]]) -> None:
    """Write latents (video (1, 24, T, H, W), audio (2, 32, A), fp32) and the report, each whole or not at all."""
    config, latents = prepared.reader.config, prepared.sequence.latents
    tensors = {"video": unpatchify(video, latents, config.patch_size), "audio": audio_rows_to_latents(audio)}
    provenance = {
        "h3core": __version__,
        "torch": torch.__version__,
        "checkpoint": job.checkpoint.name,
        "checkpoint_layout": f"{prepared.reader.detected.layout} {prepared.reader.detected.quant}",
        "prompt_embeds_sha256": hashlib.sha256(job.prompt_embeds.read_bytes()).hexdigest(),
        "geometry": str(job.geometry),
        "evaluations": str(job.evaluations),
        "seed": str(job.seed),
        "mode": job.mode,
        "world": str(len(ranks)),
        "attention": job.attention,
        "linear": job.linear,
        "reduce_dtype": job.reduce_dtype,
    }
    report = {
        "schema": "h3core-generate-1",
        **provenance,
        "rows": {"text": prepared.sequence.text.size, "audio": audio.shape[0], "video": video.shape[0]},
        "latents": {name: {"shape": list(t.shape), "std": float(t.std())} for name, t in tensors.items()},
        "ranks": ranks,
    }
    out, report_path = job.out, job.report
    if (
        not job.force
    ):  # minutes have passed: what came into being meanwhile is not ours to replace, nor a reason to lose this
        out, report_path = free_name(out), free_name(report_path)
    specs = {name: TensorSpec("F32", tuple(tensor.shape)) for name, tensor in sorted(tensors.items())}
    write_file(out, specs, lambda name, _: tensors[name], metadata=provenance, force=job.force)
    write_text(report_path, json.dumps(report, indent=1) + "\n", force=job.force)
    steps_s = max(max(rank["step_s"][1:] or rank["step_s"]) for rank in ranks)
    print(f"{out}: video {tuple(tensors['video'].shape)}, audio {tuple(tensors['audio'].shape)}, fp32")
    print(f"{report_path}: {len(ranks)} ranks, slowest step {steps_s:.3f} s")
