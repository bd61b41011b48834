"""The process that outlives the trainers: one for each job on a node. Imports neither torch nor numpy."""
