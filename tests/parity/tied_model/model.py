"""The rotary model with tied weights: the output layer's weight is the embedding table."""

from dataclasses import replace

from rotary_model.config import RotaryConfig
from rotary_model.model import RotaryModel, SequenceParallelRotaryModel
from rotary_model.plan import PLANS as ROTARY_PLANS

from titanlite.parallelize.tensor_parallel.styles import EmbeddingLocal


class TiedModel(RotaryModel):
    """Tokens [B, T] to logits [B, T, V]."""

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(config)
        assert self.tok_emb is not None
        assert self.output is not None
        self.output.weight = self.tok_emb.weight


class SequenceParallelTiedModel(TiedModel):
    """The same, cut with sequence parallelism."""


class TiedModelPlacedApart(TiedModel):
    """The same, with a plan that replicates the table and cuts the output layer."""


# As the rotary models, table and output layer by the vocabulary.
BY_VOCABULARY = ROTARY_PLANS[RotaryModel]
PLANS = {
    TiedModel: BY_VOCABULARY,
    SequenceParallelTiedModel: ROTARY_PLANS[SequenceParallelRotaryModel],
    TiedModelPlacedApart: replace(
        BY_VOCABULARY,
        tensor_parallel={**BY_VOCABULARY.tensor_parallel, "tok_emb": EmbeddingLocal(None)},
    ),
}
