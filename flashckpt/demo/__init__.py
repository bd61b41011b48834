"""`flashckpt demo`: a training job loses a node with its memory and goes on from the others, bit for bit the same."""
