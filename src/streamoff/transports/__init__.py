"""Transports: how two endpoints get an ordered frame stream between them."""
