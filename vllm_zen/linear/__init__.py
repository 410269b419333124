"""Unquantized linear layers: who can run one (backends.py), and who does (dispatch.py)."""
