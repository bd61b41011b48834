"""Bytes ↔ types: what a shard file looks like. Pure, without torch; docs/format.md has every rule."""
