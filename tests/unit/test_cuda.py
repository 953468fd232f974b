"""What only a GPU can show of the parts that run on one: NVFP4 kernels, fp32 accumulators, the model itself.

A pass means that comfy-kitchen's CUDA dequantisation has the bits that the CPU's has here, and that the
denoiser on this GPU is the denoiser on the CPU up to bf16. Run it with: pytest tests/unit/test_cuda.py
"""

from __future__ import annotations

import comfy_kitchen as ck
import pytest
import torch

from h3core.checkpoint import DenoiserReader
from h3core.checkpoint.synthesize import synthesize
from h3core.comm import alone, run_virtual
from h3core.config import TINY
from h3core.denoise import denoise
from h3core.denoiser import Denoiser
from h3core.linear import activation_scale, dense, w4a4
from h3core.nvfp4 import quantize
from h3core.packing import LatentShape, Noise, PackedSequence
from h3core.parallel import build_mode, shard_for
from h3core.schedule import Schedules
from tests.unit.nvfp4_table import hand_table, random_weight, read_by_numpy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, found none")

LATENTS = LatentShape(7, 6, 8, 37)
TEXT_ROWS = 19


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "tiny.safetensors"
    synthesize(path, config=TINY, layout="pruned", quant="nvfp4", seed=3)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cuda_dequantisation_has_the_bits_of_the_cpu(dtype):
    for weight in (random_weight(384, 512, seed=2), hand_table()[0]):
        got = weight.to("cuda").dequantize(dtype).cpu()
        assert torch.equal(got, weight.dequantize(dtype))
        assert torch.equal(got, read_by_numpy(weight).to(dtype))


def test_cuda_cuts_have_the_bits_of_the_cpu():
    weight = random_weight(512, 512, seed=5)
    cut = weight.to("cuda").rows(128, 384).columns(64, 320)
    assert torch.equal(cut.dequantize(torch.float32).cpu(), read_by_numpy(weight)[128:384, 64:320])


def test_cuda_quantiser_gives_the_values_of_the_cpu():
    source = torch.randn(256, 512, generator=torch.Generator().manual_seed(6)).bfloat16()
    ours, theirs = quantize(source.cuda()), quantize(source)
    assert torch.equal(ours.scales.view(torch.uint8).cpu(), theirs.scales.view(torch.uint8))
    same = (ours.codes.cpu() == theirs.codes).float().mean()
    # CUDA multiplies by a reciprocal where the CPU divides: values at a tie may fall to the other side.
    assert same > 0.999


def test_the_quantiser_refuses_a_dtype_that_the_gpu_kernel_does_not_take():
    with pytest.raises(ValueError, match=r"got torch\.float32 to quantise, expected bfloat16 or float16"):
        quantize(torch.zeros(128, 64, device="cuda"))


def test_fp32_accumulators_of_bf16_products_come_out_unrounded():
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*s, generator=generator).bfloat16().cuda() for s in ((64, 512), (128, 512)))
    wide = dense(x, weight, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-3)
    assert not torch.equal(wide, wide.bfloat16().float())


def test_emulated_w4a4_on_cuda_is_that_of_the_cpu():
    weight = random_weight(256, 512, seed=7)
    x = torch.randn(48, 512, generator=torch.Generator().manual_seed(8)).bfloat16()
    scale = activation_scale(x.abs().amax())
    got = w4a4(x.cuda(), weight.to("cuda"), scale.cuda(), torch.float32).cpu()
    expected = w4a4(x, weight, scale, torch.float32)
    codes, _ = ck.quantize_nvfp4(x.cuda(), scale.cuda())
    assert codes.shape == (48, 256)
    # The quantisers may differ at ties (see above); one code more or less moves a sum by up to its weight.
    assert (got - expected).norm() / expected.norm() < 5e-3


def run(checkpoint, device: str, mode: str, comm, dtype: torch.dtype = torch.bfloat16):
    reader = DenoiserReader(checkpoint)
    sequence = PackedSequence.build(LATENTS, TEXT_ROWS, TINY.patch_size)
    embeds = torch.randn(TEXT_ROWS, TINY.text_dim, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    with torch.inference_mode():
        weights = reader.load(shard_for(mode, TINY, comm.rank, comm.world), dtype=dtype, device=device)
        denoiser = Denoiser(TINY, weights, build_mode(mode, TINY, sequence.rows, comm), dtype)
        rows = denoise(denoiser, sequence, embeds, Noise.draw(TINY, LATENTS, 2), Schedules.build(4))
    return torch.cat([part.flatten().cpu() for part in rows])


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str)
def test_the_denoiser_on_the_gpu_is_the_denoiser_on_the_cpu(checkpoint, dtype, limit):
    """fp32 sums in other orders, with TF32 off: 1e-4; bf16 noise floor of two blocks 7.5e-3, four steps: 3e-2."""
    gpu, cpu = (run(checkpoint, device, "single", alone(), dtype) for device in ("cuda", "cpu"))
    assert (gpu - cpu).norm() / cpu.norm() < limit


def test_modes_at_world_one_are_equal_on_the_gpu(checkpoint):
    single, ulysses, tensor = (run(checkpoint, "cuda", mode, alone()) for mode in ("single", "ulysses", "tensor"))
    assert torch.equal(single, ulysses)
    assert torch.equal(single, tensor)


@pytest.mark.parametrize("mode", ["ulysses", "tensor"])
def test_virtual_ranks_on_the_gpu_are_near_one_rank_and_the_same_twice(checkpoint, mode):
    single = run(checkpoint, "cuda", "single", alone())
    first, second = (run_virtual(3, lambda comm: run(checkpoint, "cuda", mode, comm), device="cuda:0") for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert (first[0] - single).norm() / single.norm() < 3e-2
