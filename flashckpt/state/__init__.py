"""The user's state dict as a flat list of tensors and values, and each tensor as regions of a global one."""
