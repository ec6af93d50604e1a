"""Inference engines: start, requests, restarts and weight-sync client."""
