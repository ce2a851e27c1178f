"""Workflows: rounds of a federated job, embeddable in any asynchronous controller."""
