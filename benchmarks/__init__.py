"""Benchmarks: how the figures of the reports were made."""
