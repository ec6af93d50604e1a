"""Comparison of fp8 recipes against float32 on a run's own samples."""

from mrl.precision.measure import RecipeErrors, measure
from mrl.precision.samples import ComparisonSamples, NoSamplesError, samples_of
from mrl.precision.show import lines, picture

__all__ = ["NoSamplesError", "RecipeErrors", "ComparisonSamples", "lines", "measure", "picture", "samples_of"]
