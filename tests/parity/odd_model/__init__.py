"""Models that are right or wrong in a way of their own, by flavor; for the tests of verify."""

from titanlite import register_model

register_model(
    "odd", "odd_model.model:OddModel", "odd_model.config:OddConfig", plan="odd_model.model:PLANS"
)
