"""Tensors on their way: safetensors layout, sources, landings and lazy tensors; no event loop.

Everything that does not make or read a tensor object works without importing torch.
"""
