"""The service between agents: small messages, and shards where no lane carries them."""
