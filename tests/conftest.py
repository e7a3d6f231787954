"""What all tests share."""

from hypothesis import settings

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("titanlite", deadline=None)
settings.load_profile("titanlite")
