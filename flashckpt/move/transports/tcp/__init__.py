"""Lanes: plain or TLS connections that send the chunks of one transfer."""
