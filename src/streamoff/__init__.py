"""Federated aggregation in bounded memory."""
