"""Keeps bytes in memory: slots (`slots`), and the files that they need.

Nothing is imported here, so that a process that only reads names does not load the native part.
"""
