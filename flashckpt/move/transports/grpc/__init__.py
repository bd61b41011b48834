"""The service between agents: small messages, and shards that are not sent by lanes."""
