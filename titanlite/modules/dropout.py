"""Dropout whose masks do not depend on the plan.

torch.nn.Dropout draws masks from the rank's generator, so they change with the split of the batch,
the sequence or the features, and a plan cannot be compared with one process. Here a hash of (seed,
module, token, feature) decides whether an element is dropped. Each rank computes the masks of its
own part without communication, and recomputation gives the masks of the forward pass.
"""

import hashlib

import torch
from torch import Tensor, nn

from titanlite.errors import TitanliteError

_MASK = 2**32 - 1


class TokenDropout(nn.Module):
    """In training, zeroes features with probability `p` and scales the others by 1 / (1 - p).

    Takes x [..., D] and `token_numbers` [...], int64, the number of each token in the run, which a
    model gets if its forward has this argument. The trainer calls `set_key`, so that masks depend
    on the job's seed and the module's name. Raises TitanliteError in training without
    `token_numbers`.
    """

    key: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise TitanliteError(f"dropout probability must be at least 0 and below 1, not {p}")
        self.p = p
        # A tensor, so that blocks that differ only in their key share one compiled graph.
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def set_key(self, seed: int, name: str) -> None:
        """Set the masks for the module called `name` in a job with this seed."""
        digest = hashlib.sha256(f"{seed}:{name}:dropout".encode()).digest()
        self.key.fill_(int.from_bytes(digest[:4], "little"))

    def forward(
        self, x: Tensor, token_numbers: Tensor | None = None, first_feature: int = 0
    ) -> Tensor:
        """Drop features of `x`, whose last dimension begins with feature `first_feature`."""
        if not self.training or self.p == 0.0:
            return x
        if token_numbers is None:
            raise TitanliteError(
                "TokenDropout needs token_numbers in training; add the argument to the model's "
                "forward and pass it on"
            )
        is_kept = self._hashes(token_numbers, x.size(-1), first_feature) >= int(self.p * 2**32)
        # Unlike torch.where, this keeps the strides of `x`, which stages send to each other.
        return (x / (1.0 - self.p)).masked_fill(~is_kept, 0.0)

    def _hashes(self, token_numbers: Tensor, num_features: int, first_feature: int) -> Tensor:
        """Uniform integers in [0, 2**32), int64 [..., D]."""
        tokens = _mix(_mix(token_numbers >> 32 ^ self.key) ^ token_numbers & _MASK)
        features = torch.arange(num_features, device=token_numbers.device) + first_feature
        return _mix(tokens[..., None] ^ _mix(features))

    def extra_repr(self) -> str:
        return f"p={self.p}"


def _mix(x: Tensor) -> Tensor:
    """A permutation of [0, 2**32) in which each bit of the result depends on each bit of `x`.

    No product overflows int64. Constants: https://github.com/skeeto/hash-prospector.
    """
    x = (x >> 16 ^ x) * 0x45D9F3B & _MASK
    x = (x >> 16 ^ x) * 0x45D9F3B & _MASK
    return x >> 16 ^ x
