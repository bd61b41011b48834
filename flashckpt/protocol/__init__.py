"""What agents decide: pure, without I/O and without a clock."""
