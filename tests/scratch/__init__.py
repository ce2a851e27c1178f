"""Tests of the scratch layer."""
