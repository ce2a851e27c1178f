"""Executors: how a site runs its training."""
