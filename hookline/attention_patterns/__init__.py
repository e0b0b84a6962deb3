"""Attention patterns of models that never compute them."""
