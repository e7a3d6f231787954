from torch import nn

from titanlite.models.llama3.config import Llama3Config
from titanlite.models.llama3.model import FeedForward, Llama3
from titanlite.modules.experts import expert_layers


def build(config: Llama3Config) -> Llama3:
    model = Llama3(config)
    for layer in expert_layers([model]).values():
        shared = layer.shared_experts
        assert isinstance(shared, FeedForward)
        shared.w2 = nn.Linear(shared.w2.in_features, shared.w2.out_features, bias=True)
    return model
