"""Sampling: which groups of responses are generated when, and which of them a step trains on."""
