"""Parameters without weight decay, or with another learning rate, train the same in every plan."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from training import debug_config, differences, train

from titanlite.config import parse_args
from titanlite.config.document import format_config
from titanlite.errors import ConfigError, RankError
from titanlite.tools.verify.verify import Verifier
from titanlite.training.optimizer import Rule, base_lr, build_optimizer, find_rules

GROUPS: dict[str, Any] = {
    "optimizer": {
        "no_weight_decay": ["*norm*", "embeddings.*"],
        "lr_multipliers": {"output.*": 0.5, "layers.1.*": 2.0},
        "lr": 3e-3,
    },
    "training": {"steps": 4},
}
PLANS = {
    "TP": {"tensor_parallel_degree": 2},
    "FSDP": {"data_parallel_shard_degree": 2},
    "PP": {"pipeline_parallel_degree": 2},
}


def test_rules_follow_the_patterns() -> None:
    names = ["a.norm.weight", "a.bias", "output.weight"]
    rules = find_rules(names, ["*norm*", "*.bias"], {"output.*": 0.5, "out*": 9.0})
    assert list(rules.values()) == [Rule(False), Rule(False), Rule(True, 0.5)]
    with pytest.raises(ConfigError) as caught:
        find_rules(names, ["*nrom*"], {"head.*": 2.0})
    assert caught.value.problems == (
        'optimizer.no_weight_decay: "*nrom*" matches no trained parameter; the names are like '
        "a.norm.weight, output.weight",
        'optimizer.lr_multipliers: "head.*" matches no trained parameter; the names are like '
        "a.norm.weight, output.weight",
    )


def test_one_group_for_each_rule() -> None:
    linear = nn.Linear(2, 2)
    rules = {linear.bias: Rule(False, 2.0)}
    optimizer = build_optimizer(linear.parameters(), lr=0.1, weight_decay=0.3, rules=rules)
    found = [(g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups]
    assert found == [(0.1, 0.3, 1), (0.2, 0.0, 1)]
    assert base_lr(optimizer) == 0.1
    # A pipeline stage may have only parameters with a multiplier.
    optimizer = build_optimizer([linear.bias], lr=0.1, rules=rules)
    assert base_lr(optimizer) == 0.1


def test_the_keys_are_read_and_shown(tmp_path: Path) -> None:
    config = parse_args(
        [
            "--optimizer.no_weight_decay=*norm*,*.bias",
            '--optimizer.lr_multipliers={ "output.*" = 0.5, "output.weight" = 2 }',
        ]
    )
    path = tmp_path / "job.toml"
    path.write_text(format_config(config))
    again = parse_args([f"--job.config_file={path}"]).optimizer
    assert again == config.optimizer
    assert again.lr_multipliers == {"output.*": 0.5, "output.weight": 2.0}
    with pytest.raises(ConfigError) as caught:
        parse_args(['--optimizer.lr_multipliers={ "output.*" = 0 }'])
    assert caught.value.problems == (
        "optimizer.lr_multipliers: 0 is invalid: input should be greater than 0; give a table from "
        'quoted patterns to numbers above 0, such as { "output.*" = 0.5 }',
    )


def test_every_plan_trains_its_groups_alike() -> None:
    (reference,) = train([debug_config(GROUPS)])
    (plain,) = train([debug_config({"training": {"steps": 4}, "optimizer": {"lr": 3e-3}})])
    assert max(differences(plain, reference).values()) > 1e-4
    trained = train([debug_config(GROUPS, {"parallelism": plan}) for plan in PLANS.values()])
    for name, training in zip(PLANS, trained, strict=True):
        for what, difference in differences(training, reference).items():
            assert difference < 1e-11, f"{name}: {what}: {difference:.1e}"


def test_verify_knows_the_groups(verifier: Verifier) -> None:
    config = debug_config(GROUPS, {"parallelism": PLANS["FSDP"]})
    found = verifier.verify(config, steps=2, reloads=True)
    assert found.agrees, found.findings


def test_a_pattern_without_a_parameter_ends_the_run() -> None:
    config = debug_config({"optimizer": {"no_weight_decay": ["nothing"]}})
    with pytest.raises((ConfigError, RankError), match=r"no_weight_decay: .nothing. matches no"):
        train([config])
