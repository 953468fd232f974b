"""Model sizes: what a config refuses, how it reads diffusers' config.json, and how large the released model is.

A pass means: a size that cannot be built is refused with the value that was got and what was expected, a config.json
is read whole or refused by the names of its keys, and the released sizes make 33,122,992,896 parameters.
Run: pytest tests/unit/test_config.py
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import Any

import pytest

from h3core.checkpoint.layout import expected_tensors
from h3core.config import H3, TINY, H3Config
from h3core.partition import shards

PUBLISHED = Path(__file__).parents[2].parent / "shared" / "data" / "config" / "transformer_diffusers.json"
PARAMETERS = 33_122_992_896
FP32_PARAMETERS = 17_222_144
STORED_BYTES = 66_280_430_080
OPTIONAL = ("rope_theta", "norm_eps", "qk_norm_eps", "final_norm_eps")


def published() -> dict[str, Any]:
    """What diffusers ships as transformer/config.json, written out here."""
    return {
        "_class_name": "MiniMaxH3Transformer3DModel",
        "_diffusers_version": "0.36.0.dev0",
        "num_attention_heads": 56,
        "attention_head_dim": 128,
        "hidden_size": 5376,
        "num_layers": 50,
        "num_refiner_layers": 2,
        "ffn_dim": 14336,
        "in_channels": 24,
        "audio_in_channels": 32,
        "patch_size": [1, 2, 2],
        "text_dim": 5120,
        "freq_dim": 256,
        "time_embed_hidden_dim": 5376,
        "time_embed_dim": 2688,
        "rope_freq_dim": 16,
        "rope_theta": 10000.0,
        "norm_eps": 1e-05,
        "qk_norm_eps": 1e-05,
        "final_norm_eps": 1e-05,
    }


# --- sizes -------------------------------------------------------------------------------------------------------


def test_every_tensor_of_the_released_model_adds_up_to_its_parameters() -> None:
    specs = expected_tensors(H3, "diffusers", "bf16")
    counts = {name: math.prod(spec.shape) for name, spec in specs.items()}
    assert sum(counts.values()) == PARAMETERS
    fp32 = [name for name, spec in specs.items() if spec.dtype == "F32"]
    assert len(fp32) == 12
    assert sum(counts[name] for name in fp32) == FP32_PARAMETERS
    assert sum(counts[name] * (4 if name in fp32 else 2) for name in counts) == STORED_BYTES


def test_sizes_alone_make_the_same_number_of_parameters() -> None:
    def linear(out: int, into: int) -> int:
        return out * into + out

    c = H3
    attention = 3 * c.inner_dim * c.hidden_size + c.hidden_size * c.inner_dim + 2 * c.attention_head_dim
    block = attention + 3 * c.ffn_dim * c.hidden_size + 2 * c.hidden_size
    assert block == 385_362_688
    adaln = linear(c.adaln_dim, c.time_embed_dim)
    assert c.num_layers * adaln == 13_010_457_600
    refiner = c.num_refiner_layers * block + c.hidden_size
    assert refiner == 770_730_752
    ends = linear(c.hidden_size, c.video_row_dim) + linear(c.hidden_size, c.audio_in_channels)
    heads = linear(c.video_row_dim, c.hidden_size) + linear(c.audio_in_channels, c.hidden_size)
    time = linear(c.time_embed_hidden_dim, c.freq_dim) + linear(c.time_embed_dim, c.time_embed_hidden_dim)
    text = linear(c.hidden_size, c.text_dim)
    assert text == 27_530_496
    final = linear(2 * c.hidden_size, c.time_embed_dim) + c.hidden_size
    assert final - c.hidden_size == 28_912_128
    assert c.num_layers * (block + adaln) + refiner + ends + heads + time + text + final == PARAMETERS


@pytest.mark.parametrize(
    ("name", "value"),
    [("inner_dim", 7168), ("rotary_dim", 96), ("video_row_dim", 96), ("adaln_dim", 96_768)],
)
def test_derived_sizes_are_those_of_the_released_model(name: str, value: int) -> None:
    assert getattr(H3, name) == value


def test_the_tiny_model_has_the_released_structure_and_is_ragged_at_every_world() -> None:
    for name in ("attention_head_dim", "rope_freq_dim", "patch_size", "in_channels", "audio_in_channels", "freq_dim"):
        assert getattr(TINY, name) == getattr(H3, name)
    for world in (2, 4, 6, 8):
        held = shards(TINY, world)
        assert len({shard.heads.size for shard in held}) == 2, f"heads divide evenly over {world} ranks"


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        H3.num_layers = 1  # type: ignore[misc]


# --- refusals ----------------------------------------------------------------------------------------------------

COUNTS = [name for name in asdict(H3) if name not in (*OPTIONAL, "patch_size")]


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4", None], ids=repr)
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_that_is_no_positive_integer_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}: got {value!r}, expected a positive integer")):
        replace(H3, **{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, "10000", None], ids=repr)
@pytest.mark.parametrize("name", OPTIONAL)
def test_a_number_that_is_not_positive_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}: got {value!r}, expected a positive number")):
        replace(H3, **{name: value})


PATCHES = [(), (2, 2), (1, 2, 2, 1), (1, 0, 2), (1, 2, -2), (1, 2.0, 2), (True, 2, 2), "122", 2, None]


@pytest.mark.parametrize("value", PATCHES, ids=repr)
def test_a_patch_that_is_not_three_positive_integers_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"patch_size: got {value!r}, expected three positive integers")):
        replace(H3, patch_size=value)


def test_rotating_more_channels_than_a_head_has_is_refused_with_the_most_that_fit() -> None:
    with pytest.raises(ValueError) as refused:
        replace(H3, rope_freq_dim=22)
    for part in ("rope_freq_dim: got 22", "132 channels", "attention_head_dim=128", "at most 21"):
        assert part in str(refused.value)
    assert replace(H3, rope_freq_dim=21).rotary_dim == 126


# --- config.json -------------------------------------------------------------------------------------------------


def test_the_published_config_json_reads_as_the_released_model() -> None:
    config = H3Config.from_dict(json.loads(json.dumps(published())))
    assert config == H3
    assert hash(config) == hash(H3)


def test_numbers_that_a_config_json_may_leave_out_have_the_released_values() -> None:
    values = {key: value for key, value in published().items() if key not in OPTIONAL}
    assert H3Config.from_dict(values) == H3


def test_every_given_key_counts() -> None:
    given = published() | {"norm_eps": 1e-6, "qk_norm_eps": 2e-6, "final_norm_eps": 3e-6, "rope_theta": 5e6}
    config = H3Config.from_dict(given)
    assert [config.norm_eps, config.qk_norm_eps, config.final_norm_eps, config.rope_theta] == [1e-6, 2e-6, 3e-6, 5e6]


@pytest.mark.parametrize("name", [*COUNTS, "patch_size"])
def test_a_missing_key_is_refused_by_name(name: str) -> None:
    values = published()
    del values[name]
    with pytest.raises(ValueError, match=re.escape(f"unknown keys [], missing keys ['{name}']; expected [")):
        H3Config.from_dict(values)


def test_unknown_and_missing_keys_are_named_in_one_error() -> None:
    values = published() | {"window": 3, "guidance": 1.0}
    del values["ffn_dim"], values["num_layers"]
    with pytest.raises(ValueError) as refused:
        H3Config.from_dict(values)
    assert "unknown keys ['guidance', 'window'], missing keys ['ffn_dim', 'num_layers']" in str(refused.value)
    assert "'num_attention_heads'" in str(refused.value), "the keys that are known should be listed"


@pytest.mark.parametrize("value", [2, None, "1x2x2", [1, 2], {"t": 1}], ids=repr)
def test_a_config_json_with_a_patch_of_another_kind_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"patch_size: got .*expected three positive integers"):
        H3Config.from_dict(published() | {"patch_size": value})


def test_the_file_that_diffusers_ships_is_the_released_model() -> None:
    if not PUBLISHED.is_file():
        pytest.skip("the published transformer/config.json does not lie beside this checkout")
    values = json.loads(PUBLISHED.read_text())
    assert values == published()
    assert H3Config.from_dict(values) == H3
