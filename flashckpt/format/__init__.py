"""Encodes and decodes shard files. Pure, without torch. docs/format.md has every rule."""
