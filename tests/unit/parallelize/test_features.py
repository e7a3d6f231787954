"""Each parallel feature is one folder, listed once."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from titanlite.config import JobConfig
from titanlite.config.keys import job_keys, job_sections
from titanlite.config.toml import put
from titanlite.fields import Check
from titanlite.parallelize.feature import Feature
from titanlite.parallelize.parallelize import step_of
from titanlite.parallelize.steps import FEATURES, STEPS, features_on

FOLDER = Path(__file__).parents[3] / "titanlite/parallelize"


def test_every_folder_with_a_spec_is_a_feature() -> None:
    assert {one.folder for one in FEATURES} == {p.parent.name for p in FOLDER.glob("*/spec.py")}
    assert len({one.name for one in FEATURES}) == len(FEATURES)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.folder)
def test_no_check_of_a_spec_is_forgotten(feature: Feature) -> None:
    spec = import_module(f"titanlite.parallelize.{feature.folder}.spec")
    found = [
        value
        for value in vars(spec).values()
        if isinstance(value, Check) and value.problems.__module__ == spec.__name__
    ]
    assert found == list(feature.checks)
    assert all(check.purpose for check in found)


@pytest.mark.parametrize("feature", STEPS, ids=lambda feature: feature.folder)
def test_a_step_looks_at_the_model_if_its_feature_says_so(feature: Feature) -> None:
    assert feature.checks_model == (step_of(feature).check_model is not None)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.folder)
def test_off_switches_a_feature_off(feature: Feature) -> None:
    """And its variations set keys that exist."""
    varied = [settings for one in feature.variations for settings in one.values.values()]
    names = {name for settings in [*varied, feature.off] for name in settings}
    assert names <= job_keys().keys()
    if feature.off and feature.folder != "fsdp":  # of data parallelism, offload alone is optional
        values: dict[str, Any] = {}
        for name, value in feature.off.items():
            put(values, name, value)
        assert feature not in features_on(JobConfig.from_dict(values))


def test_every_section_of_a_feature_is_a_section_of_a_job() -> None:
    for name, kind in ((name, kind) for one in FEATURES for name, kind in one.sections.items()):
        assert issubclass(job_sections()[name], kind)
