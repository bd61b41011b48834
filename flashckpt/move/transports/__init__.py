"""Transports of bytes between nodes: gRPC calls open every transfer, lanes (TCP) may carry its chunks."""
