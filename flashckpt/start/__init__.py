"""Joins a launch, takes a job over, and leaves."""
