"""Lanes: plain TCP connections that carry chunks beside the gRPC calls that order them."""
