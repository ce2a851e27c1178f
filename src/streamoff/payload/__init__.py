"""Payload trees: message bodies with tensors anywhere in them, and how their refs end."""
