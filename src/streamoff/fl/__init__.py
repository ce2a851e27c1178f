"""Federated learning on top of transfers: aggregation, workflows, executors and what they exchange."""
