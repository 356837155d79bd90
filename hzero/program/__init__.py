"""The shard plan, and the steps of a program as data: no tensors, no process groups."""
