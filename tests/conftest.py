"""Settings of all tests."""

from hypothesis import settings

# A deadline says more of what else the machine does than of the code.
settings.register_profile("hzero", deadline=None)
settings.load_profile("hzero")
