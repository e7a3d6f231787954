"""The image transformer: published sizes, the notes' embeddings, causality, the cache."""

import math

import pytest
import torch
from torch import nn

from titanlite.models.image_transformer.config import FLAVORS
from titanlite.models.image_transformer.model import ImageEmbeddings, ImageTransformer
from titanlite.training.initial_weights import generator_for, initialize


def build(seed: int = 0, **changes) -> ImageTransformer:
    from dataclasses import replace

    with torch.device("meta"):
        model = ImageTransformer(replace(FLAVORS["debug"], **changes))
    initialize(model, seed, torch.device("cpu"))
    return model


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("flavor", FLAVORS)
def test_the_model_has_as_many_parameters_as_its_config_says(flavor):
    with torch.device("meta"):
        model = ImageTransformer(FLAVORS[flavor])
    assert num_parameters(model) == FLAVORS[flavor].num_parameters


def test_the_embeddings_take_tokens_and_device_as_the_notes_have_it():
    embeddings = ImageEmbeddings(256, 128)
    tokens = torch.randint(256, (2, 3072))
    whole = embeddings(tokens, "cpu")
    assert whole.shape == (2, 3072, 128)
    position = 2 * 1024 + 5 * 32 + 7  # channel 2, row 5, column 7
    expected = (
        embeddings.tok_emb.weight[tokens[1, position]]
        + embeddings.row_emb.weight[5]
        + embeddings.col_emb.weight[7]
        + embeddings.chan_emb.weight[2]
    )
    torch.testing.assert_close(whole[1, position], expected)
    some = embeddings(tokens[:, [position]], positions=torch.tensor([position]))
    torch.testing.assert_close(some[:, 0], whole[:, position])


def test_the_first_loss_is_that_of_knowing_nothing():
    model = build()
    tokens = torch.randint(17, (4, 64))
    loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(17), abs=1e-6)


@pytest.mark.parametrize("num_kv_heads", [None, 2])
def test_no_position_sees_a_later_one(num_kv_heads):
    model = build(zero_init_output=False, num_kv_heads=num_kv_heads).double()
    tokens = torch.randint(17, (1, 64))
    changed = tokens.clone()
    changed[0, 40] = (tokens[0, 40] + 1) % 17
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


@pytest.mark.parametrize("num_kv_heads", [None, 2])
def test_the_cache_gives_the_logits_of_the_whole_sequence(num_kv_heads):
    model = build(zero_init_output=False, num_kv_heads=num_kv_heads).double()
    tokens = torch.randint(17, (3, 64))
    cache = model.make_cache(64)
    with torch.inference_mode():
        steps = [model(tokens[:, i : i + 1], cache=cache) for i in range(64)]
        torch.testing.assert_close(torch.cat(steps, dim=1), model(tokens))


def test_starting_values_depend_on_seed_and_name_alone():
    one, same, other = build(1), build(1), build(2)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
    wq = [one.get_parameter(f"layers.{layer}.attention.wq.weight") for layer in range(2)]
    assert not torch.equal(wq[0], wq[1])
    assert not torch.equal(wq[0], other.get_parameter("layers.0.attention.wq.weight"))
    assert wq[0].std().item() == pytest.approx(0.02, rel=0.1)
    residual = one.get_parameter("layers.0.attention.wo.weight")
    assert residual.std().item() == pytest.approx(0.02 / math.sqrt(2 * 2), rel=0.1)
    assert not one.output.weight.any()
    assert (one.norm.weight == 1).all()


def test_generators_of_different_names_differ():
    draws = {torch.rand(1, generator=generator_for(0, name)).item() for name in "abcdefgh"}
    assert len(draws) == 8
