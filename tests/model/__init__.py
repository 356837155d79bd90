"""Tests of the performance model."""
