"""Accuracy of a reward model's scores on rows of a file, for `mrl eval reward`."""
