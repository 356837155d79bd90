"""The commands of ``hzero`` that need more than the engine."""
