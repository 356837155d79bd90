"""``hzero plan``: memory, bytes, link times and predicted steps of a model on a machine, before anything runs."""
