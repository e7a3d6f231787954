"""The groups of parameters that FSDP2 has, in every release of torch."""

from types import SimpleNamespace

from titanlite.modules.shards import fsdp_groups


def test_a_module_has_several_groups_or_one_or_none() -> None:
    """Experts that are sharded over other ranks than the rest have a group of their own."""

    def module(**state: object) -> SimpleNamespace:
        return SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(**state))

    assert fsdp_groups(module(_fsdp_param_groups=["dense", "experts"])) == ["dense", "experts"]
    assert fsdp_groups(module(_fsdp_param_groups=[])) == []
    # Torch 2.11.
    assert fsdp_groups(module(_fsdp_param_group="all")) == ["all"]
    assert fsdp_groups(module(_fsdp_param_group=None)) == []
