"""The ranks of one launch, and the private group by which they agree."""
