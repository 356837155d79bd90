"""``hzero plan``: memory, bytes and link times of a model on a machine, before anything runs. Needs no torch."""
