"""Transports of bytes between nodes. No other module asks which one is used."""
