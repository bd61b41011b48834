"""Is this node fit for saving? Each module looks (I/O, into facts) and judges (pure, facts into findings)."""
