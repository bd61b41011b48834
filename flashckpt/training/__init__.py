"""The parts of a training state, and when to save them: what CheckpointManager is made of."""
