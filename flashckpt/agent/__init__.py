"""The process that outlives the trainers: one per job and node. Imports neither torch nor numpy."""
