"""How the tied models are cut: as the rotary models, table and output layer by the vocabulary."""

from dataclasses import replace

from rotary_model.model import RotaryModel, SequenceParallelRotaryModel
from rotary_model.plan import PLANS as ROTARY_PLANS

from tied_model.model import SequenceParallelTiedModel, TiedModel, TiedModelPlacedApart
from titanlite.parallelize.tensor_parallel.styles import EmbeddingLocal

BY_VOCABULARY = ROTARY_PLANS[RotaryModel]
PLANS = {
    TiedModel: BY_VOCABULARY,
    SequenceParallelTiedModel: ROTARY_PLANS[SequenceParallelRotaryModel],
    TiedModelPlacedApart: replace(
        BY_VOCABULARY,
        tensor_parallel={**BY_VOCABULARY.tensor_parallel, "tok_emb": EmbeddingLocal(None)},
    ),
}
