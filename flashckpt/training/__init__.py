"""The modules of CheckpointManager: the parts of a training state, and the decision when to save them."""
