"""Comparison of fp8 recipes against float32 on a run's own samples."""

from mrl.precision.measure import Row, measure
from mrl.precision.samples import NoSamples, Samples, samples_of
from mrl.precision.show import lines, picture

__all__ = ["NoSamples", "Row", "Samples", "lines", "measure", "picture", "samples_of"]
