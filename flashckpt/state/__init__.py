"""Turns the user's state dict into flat tensors and values, and each tensor into regions of a global one."""
