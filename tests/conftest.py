"""Settings shared by all tests."""

from hypothesis import settings

# No deadline: the time of an example depends more on the load of the machine than on the code.
settings.register_profile("titanlite", deadline=None)
settings.load_profile("titanlite")
