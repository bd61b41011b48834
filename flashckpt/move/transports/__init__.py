"""Ways for bytes between nodes. Nothing outside asks which one it is."""
