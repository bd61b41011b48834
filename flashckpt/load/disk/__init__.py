"""Loads checkpoints from disk or an object store, the slowest tier."""
