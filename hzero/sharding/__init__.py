"""Shard plan, index maps, bytes and memory: pure arithmetic."""
