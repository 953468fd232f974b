"""Options: each value comes from the command line, its variable or the default, in that order, and says so.

Run it with: pytest tests/unit/test_options.py
"""

from __future__ import annotations

import pytest

from h3core.qualify.options import OPTIONS, check_for_tier, reductions, resolve, worlds_for
from h3core.qualify.tiers import TIERS

BY_FLAG = {option.flag: option for option in OPTIONS}
SAMPLES = {
    "--world": "2,8",
    "--mode": "tensor",
    "--attention": "math",
    "--linear": "w4a4",
    "--checkpoint": "/x/y.safetensors",
    "--geometry": "1344x768x124",
    "--steps": "4",
    "--seed": "7",
    "--device": "cpu",
    "--share-gpus": "1",
    "--rank-timeout": "7.5",
    "--report-dir": "/x/out",
    "--gates": "/x/gates.json",
    "--compare": "/x/old.json",
}


def settings(**given):
    return resolve(given, {})


def test_every_option_has_a_sample_here():
    assert SAMPLES.keys() == BY_FLAG.keys()


@pytest.mark.parametrize("flag", SAMPLES)
def test_an_option_wins_over_its_variable_and_that_over_the_default(flag):
    option, text = BY_FLAG[flag], SAMPLES[flag]
    by_variable = resolve({}, {option.variable: text})[option.name]
    assert (by_variable.text, by_variable.source, by_variable.given) == (text, option.variable, True)
    both = resolve({option.name: text}, {option.variable: "nonsense"})[option.name]
    assert (both.text, both.source) == (text, "command line")
    neither = resolve({}, {option.variable: ""})[option.name]
    assert (neither.text, neither.source, neither.given) == (option.default, "default", False)


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("--world", "two", "got 'two', expected N or N,N"),
        ("--world", "", "got '', expected N or N,N"),
        ("--world", "1", "world 1 always runs"),
        ("--world", "2,-4", "expected numbers from 2"),
        ("--mode", "ring", "got 'ring', expected one of both, ulysses, tensor"),
        ("--attention", "magic", "expected one of sdpa, math"),
        ("--geometry", "864x480", "864x480"),
        ("--steps", "0", "expected a whole number from 1"),
        ("--steps", "1.5", "expected a whole number from 1"),
        ("--seed", "-1", "expected a whole number from 0"),
        ("--rank-timeout", "nan", "expected a positive number of seconds"),
        ("--rank-timeout", "inf", "expected a positive number of seconds"),
        ("--rank-timeout", "0", "expected a positive number of seconds"),
        ("--rank-timeout", "1e300", "at most 86400"),
        ("--rank-timeout", "soon", "expected a positive number of seconds"),
        ("--report-dir", "", "got an empty path"),
    ],
)
def test_a_value_that_cannot_be_is_a_usage_error_that_names_where_it_came_from(flag, text, message):
    with pytest.raises(pytest.UsageError, match=f"^{flag}: .*{message}"):
        resolve({BY_FLAG[flag].name: text}, {})
    if text:
        with pytest.raises(pytest.UsageError, match=f"^{BY_FLAG[flag].variable}: .*{message}"):
            resolve({}, {BY_FLAG[flag].variable: text})


def test_worlds_are_sorted_and_distinct():
    assert settings(world="8,2,2")["world"].value == (2, 8)


@pytest.mark.parametrize(("gpus", "worlds"), [(2, (2,)), (5, (2, 4)), (7, (2, 4, 6)), (8, (2, 4, 6, 8))])
def test_default_worlds_are_those_that_fit(gpus, worlds):
    assert worlds_for(settings(), "cuda", gpus) == worlds


def test_more_ranks_than_gpus_is_a_usage_error_that_says_both_numbers():
    with pytest.raises(pytest.UsageError, match="asked for 8 ranks, 4 GPUs are visible; ask for 2 to 4"):
        worlds_for(settings(world="8"), "cuda", 4)
    with pytest.raises(pytest.UsageError, match=r"0 GPUs are visible, and the smallest world is 2$"):
        worlds_for(settings(), "cuda", 0)
    with pytest.raises(pytest.UsageError, match="1 GPU is visible, and the smallest world is 2; --share"):
        worlds_for(settings(world="8"), "cuda", 1)
    assert worlds_for(settings(world="8", share_gpus="1"), "cuda", 1) == (8,)


def test_a_cpu_tier_has_at_most_one_rank_a_head():
    assert worlds_for(settings(world="9"), "cpu", 0) == (9,)
    with pytest.raises(pytest.UsageError, match="asked for 10 ranks, the test model has 9 heads"):
        worlds_for(settings(world="10"), "cpu", 0)


def test_an_option_that_the_tier_would_ignore_is_refused():
    with pytest.raises(pytest.UsageError, match="--checkpoint: the gloo tier would ignore it"):
        check_for_tier(settings(checkpoint="/x"), TIERS["gloo"])
    with pytest.raises(pytest.UsageError, match="--gates: the nccl tier would ignore it, it belongs to gate"):
        check_for_tier(settings(gates="/x"), TIERS["nccl"])
    check_for_tier(resolve({}, {"H3_MODEL_PATH": "/x"}), TIERS["gloo"])  # the launchers' variable


def test_a_device_that_the_tier_does_not_run_on_is_refused():
    with pytest.raises(pytest.UsageError, match="--device=cuda: the gloo tier runs on cpu"):
        check_for_tier(settings(device="cuda"), TIERS["gloo"])


def test_only_what_is_less_than_the_default_profile_reduces():
    assert reductions(settings(), TIERS["gloo"]) == []
    assert reductions(settings(world="2", mode="both", seed="440420"), TIERS["gloo"]) == []
    assert reductions(settings(mode="ulysses", seed="7"), TIERS["gloo"]) == ["mode ulysses", "seed 7"]
    assert reductions(settings(steps="4"), TIERS["nccl"]) == ["steps 4"]
    assert reductions(settings(steps="012"), TIERS["nccl"]) == []
    assert reductions(settings(steps="4"), TIERS["gloo"]) == []
