"""Recording a step leaves the step as it is."""

import weakref

import torch
from torch import nn

from titanlite.tools.verify.events import Events, recorded


def test_no_gradient_is_held():
    # One that is held is copied where it is accumulated, and DTensor reduces a Partial copy.
    model, found = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), []
    with recorded([model], [True], lambda _, name: name, kept := Events()):
        output = model(torch.ones(2, 3))
        output.register_hook(lambda gradient: found.append(weakref.ref(gradient)))
        output.sum().backward()
    assert found[0]() is None
    assert kept.gradients_of("1") is not None
