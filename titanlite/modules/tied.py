"""Tied weights: one parameter with several names, such as an embedding table and an output layer.

The first name in the model's order is the parameter's name: in checkpoints, at initialization and
in every comparison. Each step of parallelize keeps all names on one parameter. Pipeline stages that
have different names of it hold copies instead (parallelize/stage_copies.py).
"""

from collections.abc import Mapping

from torch import nn


def find_tied(model: nn.Module) -> dict[str, str]:
    """The tied parameters of `model`: a dict from each further name of one to its first name."""
    first: dict[nn.Parameter, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            tied[name] = first[parameter]
    return tied


def tie(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Register the parameter of each first name under its further names, too.

    `tied` is the result of `find_tied`. Call this after an operation that has replaced parameters
    one name at a time, as `nn.Module.to_empty` does.
    """
    for name, first in tied.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_parameter(leaf, model.get_parameter(first))
