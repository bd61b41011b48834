"""How bytes move between nodes: both halves of a push, without the wire between them."""
