"""The rotary model, with float numbers beside the tokens and a label in its last stage."""

from rotary_model.model import RotaryModel
from rotary_model.plan import PLANS as ROTARY_PLANS
from torch import Tensor


class WideModel(RotaryModel):
    """Levels [B, T] scale the embeddings; the label [B] shifts the logits."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        levels: Tensor | None = None,
        label: Tensor | None = None,
    ) -> Tensor:
        x = tokens
        if self.tok_emb is not None:
            assert levels is not None
            x = self.tok_emb(tokens) * levels[..., None].to(self.tok_emb.weight.dtype)
        for layer in self.layers.values():
            x = layer(x, positions)
        if self.norm is not None:
            x = self.norm(x)
        if self.output is None:
            return x
        assert label is not None
        return self.output(x) * (1 + label[:, None, None])


# As the rotary model is cut, without sequence parallelism.
PLANS = {WideModel: ROTARY_PLANS[RotaryModel]}
