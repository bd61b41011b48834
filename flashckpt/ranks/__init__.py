"""The ranks of one launch: who they are, and the private group by which they agree."""
