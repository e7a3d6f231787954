"""Mixture of experts: routing, dispatch, grouped products, and balancing.

    layer.py      ExpertLayer: the feed-forward of a block, made of the parts below
    router.py     which experts a token goes to, and with which weights
    dispatch.py   tokens sorted by expert, sent to the ranks that hold the experts, and combined
    capacity.py   the slots that are dropped if the experts' capacity is limited
    products.py   the SwiGLU of every expert on its own tokens
    balance.py    the number of tokens of each expert, and the auxiliary loss
    balancer.py   the load of all layers of a job, and the balancing biases

Nothing here depends on a plan, except the process groups that parallelize/expert_parallel.py sets.
"""

from titanlite.modules.experts.balancer import Balancer as Balancer
from titanlite.modules.experts.balancer import expert_layers as expert_layers
from titanlite.modules.experts.layer import ExpertLayer as ExpertLayer
from titanlite.modules.experts.layer import RoutedExperts as RoutedExperts
from titanlite.modules.experts.layer import RoutedLayer as RoutedLayer
from titanlite.modules.experts.router import Gate as Gate
from titanlite.modules.experts.router import Router as Router
