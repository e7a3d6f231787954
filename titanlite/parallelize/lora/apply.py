"""apply_lora: freeze a model, and give its linear layers trained adapters of low rank."""

from collections.abc import Sequence

from torch import nn

from titanlite.errors import TitanliteError, suggest
from titanlite.modules.experts import expert_layers
from titanlite.modules.lora import LoRALinear
from titanlite.modules.names import canonical_name
from titanlite.parallelize.arguments import Plan, as_plan
from titanlite.parallelize.plan import matches


def apply_lora(
    model: nn.Module,
    rank: int,
    alpha: float = 16.0,
    *,
    dropout: float = 0.0,
    target_modules: Sequence[str] = (),
    init_lora_weights: bool = True,
    plan: Plan | None = None,
) -> tuple[str, ...]:
    """Freeze `model`, and make its linear layers LoRALinear, in place; returns their names.

    `target_modules` are ends of their names, such as "wq" or "attention.*"; by default all linear
    layers in the plan's blocks, or in the model if it has none. The balancing biases of experts
    stay as they are, too. Call this before apply_tp, which cuts the adapters like their layers.
    Adapters have no values yet on "meta"; else those of `init_lora_weights`: B is zero.

    Raises TitanliteError if a target matches no linear layer.
    """
    plan = as_plan("apply_lora", model, plan)
    linear = {
        canonical_name(name): layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and name
    }
    for target in target_modules:
        if not any(_ends_with(name, target) for name in linear):
            leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            advice = suggest(target, leaves, f"they are called {', '.join(leaves)}", repr)
            raise TitanliteError(
                f"no linear layer of {type(model).__name__} is called {target!r}; {advice}"
            )
    chosen = [name for name in linear if any(_ends_with(name, one) for one in target_modules)]
    if not target_modules:
        chosen = [name for name in linear if plan.is_in_block(name)] or list(linear)
    if not chosen:
        raise TitanliteError(f"{type(model).__name__} has no nn.Linear to adapt")
    model.requires_grad_(False)
    for layer in expert_layers([model]).values():
        layer.bias_step = None
    for name in chosen:
        LoRALinear.convert(linear[name], rank, alpha, dropout, starts_at_zero=init_lora_weights)
    return tuple(chosen)


def _ends_with(name: str, target: str) -> bool:
    count = target.count(".") + 1
    return matches(".".join(name.split(".")[-count:]), target)
