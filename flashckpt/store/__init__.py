"""Where bytes rest: slots in memory (`slots`), and what they stand on.

Nothing is imported here, so that a process that only reads names does not load the native part.
"""
