"""save: plan → snapshot → seal; later arrows (replicate, commit, flush) begin where a shard is sealed."""
