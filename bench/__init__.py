"""Measures saving and loading on one node, against memcpy and against what else a user could take."""
