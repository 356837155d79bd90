"""Codecs by parallel dimension: tensor groups and pipeline stages of a GPT-NeoX, as in arXiv 2409.02423."""
