"""Moves a shard's bytes from node to node."""
