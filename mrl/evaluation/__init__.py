"""Evaluation of a model: likelihood of held-out rows, correct answers, agreement with human preferences, benchmarks."""
