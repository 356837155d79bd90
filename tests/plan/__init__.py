"""Tests of `hzero plan`."""
