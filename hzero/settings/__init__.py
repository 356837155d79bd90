"""The trainer's configuration: composed from Hydra groups, and checked. `hzero train` runs it, `hzero plan` computes from it."""
