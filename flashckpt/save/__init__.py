"""save: plan → snapshot → seal. Replication, commit and flush begin once a shard is sealed."""
