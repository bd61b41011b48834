"""Checks whether this node is fit for saving. Each module collects facts (I/O) and judges them (pure)."""
