"""Weights and gradients of a model over the tiers: refresh, unshard, accumulate, boundary."""
