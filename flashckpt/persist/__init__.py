"""The persistent tier: stock DCP checkpoints on disk or in an object store, written from sealed shards."""
