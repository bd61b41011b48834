"""`flashckpt demo`: a training job is killed and goes on from memory, bit for bit as if nothing had happened."""
