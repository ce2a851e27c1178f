"""Measurements: what streamoff costs, on the machine that runs them.

``python -m benchmarks SUITE`` runs a suite. Figures of memory and disk are gated where a bound is promised; figures
of time are shown and never gated, because another program on the machine changes them severalfold.
"""
