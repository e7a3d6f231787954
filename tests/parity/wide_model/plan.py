"""How the wide model is cut: as the rotary model is, without sequence parallelism."""

from rotary_model.model import RotaryModel
from rotary_model.plan import PLANS as ROTARY_PLANS

from wide_model.model import WideModel

PLANS = {WideModel: ROTARY_PLANS[RotaryModel]}
