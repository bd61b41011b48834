"""A shard's bytes from here to there."""
