"""Lanes: plain or TLS connections that carry the chunks of one transfer."""
