"""`titanlite convert --check`: a Hugging Face folder, as titanlite and as transformers read it.

The same folder is loaded into both models, which then compute the same tokens. What is compared,
until something differs: the names of the tensors, their shapes, and the output of each module with
a weight, in the order of titanlite's forward pass.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.checkpoint.weights import Names, StoredWeights, to_stored
from titanlite.errors import ConfigError, TitanliteError
from titanlite.models.hf_format import HFTensor
from titanlite.modules.batch import call_model, make_batch
from titanlite.tools.options import say

# Relative to the largest value of an output. Both models compute in float32.
TOLERANCE = 1e-4
ROWS, LENGTH = 2, 16


def check_folder(folder: Path, stored: StoredWeights, names: Names, plain: nn.Module) -> None:
    """Compare `plain`, which has the weights of `folder`, with transformers' model of the folder.

    Raises TitanliteError with the first difference.
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        import titanlite.models.hf.model  # noqa: F401 (filters what the import of torchao logs)
    except ImportError:
        raise ConfigError(
            '--check: it needs the package transformers; pip install "titanlite[hf]"'
        ) from None
    logging.disable_progress_bar()
    theirs, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    for kind in ("missing", "unexpected", "mismatched"):
        if keys := sorted(map(str, info[f"{kind}_keys"])):
            raise TitanliteError(
                f"{folder}: transformers finds {len(keys)} {kind} keys, of which the first is "
                f"{keys[0]}; write the folder again, or correct its names in the HFFormat"
            )
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    places = {n: names.place(n, parameter.shape) for n, parameter in plain.named_parameters()}
    for name, parameter in plain.named_parameters():
        wanted = places[name].shape(parameter.shape)
        if (found := shapes.get(places[name].name, wanted)) != wanted:
            raise TitanliteError(
                f"{name} is stored as {places[name].name} {list(wanted)}, which transformers has "
                f"as {list(found)}; correct the HFFormat"
            )
    say(f"names and shapes agree: {len(stored.tensors)} tensors")
    _check_outputs(plain, theirs, places)


def _check_outputs(plain: nn.Module, theirs: Any, places: Mapping[str, HFTensor]) -> None:
    size = theirs.get_input_embeddings().num_embeddings
    tokens = torch.arange(ROWS * LENGTH).remainder(size).view(ROWS, LENGTH)
    own, other = _outputs(plain.eval()), _outputs(theirs.eval())
    with torch.no_grad():
        logits = call_model(plain, make_batch(tokens))
        wanted = theirs(tokens).logits
    compared, largest, at = 0, 0.0, ""
    for name, output in own.items():
        place = places.get(f"{name}.weight")
        their_name = "" if place is None else place.name.removesuffix(".weight")
        if place is None or their_name not in other:
            continue
        difference = _difference(_as_theirs(output, place), _part(other[their_name], place, output))
        compared += 1
        if not difference <= TOLERANCE:
            raise TitanliteError(
                f"{name}, there {their_name}, is the first module whose output differs, by "
                f"{difference:.1e} of its largest value; its weights, or what is computed between "
                "it and the module before, are not those of transformers"
            )
        if difference >= largest:
            largest, at = difference, name
    if not (difference := _difference(logits, wanted)) <= TOLERANCE:
        raise TitanliteError(f"the logits differ by {difference:.1e} of the largest")
    say(f"outputs agree: {compared} modules, to {largest:.1e} ({at}); logits to {difference:.1e}")


def _outputs(model: nn.Module) -> dict[str, Tensor]:
    """Filled by the next forward pass: the output of each module that returns a tensor."""
    found: dict[str, Tensor] = {}

    def keep(name: str, output: Any) -> None:
        if isinstance(output, Tensor):
            found.setdefault(name, output)

    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
    return found


def _as_theirs(output: Tensor, place: HFTensor) -> Tensor:
    """An output with its features in the order of the folder."""
    if place.head_dim is None:
        return output
    rows = to_stored(output.movedim(-1, 0).flatten(1), HFTensor("", head_dim=place.head_dim))
    return rows.view(output.size(-1), *output.shape[:-1]).movedim(0, -1)


def _part(whole: Tensor, place: HFTensor, own: Tensor) -> Tensor:
    """The features of a joined output that are those of one of titanlite's modules."""
    return whole if place.rows is None else whole.narrow(-1, place.rows[0], own.size(-1))


def _difference(own: Tensor, theirs: Tensor) -> float:
    """The largest difference over the largest value; titanlite's blocks have the sequence first."""
    if own.shape != theirs.shape and own.ndim > 1:
        own = own.transpose(0, 1)
    if own.shape != theirs.shape:
        return float("inf")
    return float((own - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
