"""Attention over a paged KV cache: who runs which layer, and our backend for it."""
