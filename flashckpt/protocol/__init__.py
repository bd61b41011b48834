"""Decides what an agent does: pure, without I/O and without a clock."""
