"""Implements `flashckpt demo`: a training job loses a node with its memory and resumes, bit for bit the same."""
