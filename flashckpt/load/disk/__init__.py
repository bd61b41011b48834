"""The slowest tier of a load: checkpoints on disk or in an object store."""
